# shellcheck shell=sh
#
# Runs one broker in a folder of its own, and removes both when its owner is gone.
#
# Usage: sh -c "$(cat supervisor.sh)" brokertest-supervisor
#
# Standard input carries commands, one a line; standard output carries an answer to
# each. The owner holds the other end of standard input and nobody else does, so end
# of file means that the owner has shut the broker down or has died.
#
#   (at first)  folder PATH   the folder, made here
#   start       started       the broker, in the background: start.sh, which must
#                             exec it, and at the first time helper.sh if there is one
#   kill        killed        all its processes have ended
#
# While the broker does not run there is a file "gone" in the folder.

server= helper=
umask 077
# An answer to a dead owner must not kill this script before it has cleaned up.
trap '' PIPE

clean() {
	trap - EXIT
	trap '' HUP INT TERM
	[ -n "$server" ] && kill -KILL "$server"
	[ -n "$helper" ] && kill -KILL "$helper"
	# Also waits for the reader of "alive", that is for the last process.
	wait
	cd /
	# Erlang's helpers may still be writing their last words.
	rm -rf "$folder" || rm -rf "$folder"
}

folder=$(mktemp -d "${TMPDIR:-/tmp}/brokertest.XXXXXX") || exit 1
trap clean EXIT
trap 'exit 1' HUP INT TERM
cd "$folder" || exit 1
: >gone
echo "folder $folder"
exec 2>>log

while read -r verb; do
	case $verb in
	start)
		if [ -z "$helper" ] && [ -f helper.sh ]; then
			sh ./helper.sh </dev/null >>log 2>&1 &
			helper=$!
		fi
		# Every process of the broker inherits descriptor 9; the pipe's reader sees
		# the end of file when the last of them has ended.
		rm -f alive gone
		mkfifo alive
		(
			cat <alive >/dev/null
			: >gone
		) &
		watcher=$!
		exec 9>alive
		sh ./start.sh </dev/null >>log 2>&1 &
		server=$!
		exec 9>&-
		rm -f alive
		echo started
		;;
	kill)
		kill -KILL "$server"
		wait "$server"
		wait "$watcher"
		server=
		echo killed
		;;
	esac
done
