package record

import "reflect"

// Equal is a == b for values of any type: what cannot be compared is not the
// same, where == would panic.
func Equal(a, b any) bool { return reflect.ValueOf(a).Comparable() && a == b }
