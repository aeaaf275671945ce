# shellcheck shell=sh
#
# Runs one throw-away PostgreSQL cluster and removes it when its owner is gone.
#
# Usage: sh -c "$(cat supervisor.sh)" pgtest-supervisor PROGRAMS
#   PROGRAMS  folder with initdb, postgres, ...
#
# Standard input carries commands, one a line; standard output carries reports.
# The owner holds the other end of standard input and nobody else does, so end
# of file means that the owner has stopped the cluster or has died.
#
#   (at first)          folder PATH     the cluster's folder, made here
#   run PROGRAM ARG...  ran CODE        a program that ends by itself
#   copy PATH           ran CODE        data from another cluster's folder
#   start               started PID     the postmaster, in the background
#                       gone            later: it and all its descendants ended
#   reap                exited CODE     its exit code; PID may be reused now
#
# The folder is made and removed by this script, and whatever writes into it is
# its child, so there is no moment at which the owner's death leaves anything.

bin=$1
postmaster=

# Arguments of "run" are split at blanks, and only there.
set -f
umask 077
# A report to a dead owner must not kill this script before it has cleaned up.
trap '' PIPE

clean() {
	trap - EXIT
	trap '' HUP INT TERM
	if [ -n "$postmaster" ]; then
		# QUIT is what a throw-away server deserves: all its processes end at
		# once. But a shell starts its background jobs with QUIT ignored, so
		# in its first milliseconds the postmaster does not hear it; it dies of
		# TERM then. CONT is for one that a test has stopped.
		kill -TERM "$postmaster"
		kill -QUIT "$postmaster"
		kill -CONT "$postmaster"
	fi
	# Also waits for the reader of "alive", that is for the last backend.
	wait
	# A postmaster that was killed leaves its lock file and a System V memory
	# segment, whose id is the last word on line 7 of that file.
	if [ -f data/postmaster.pid ]; then
		segment=$(sed -n 7p data/postmaster.pid)
		[ -n "$segment" ] && ipcrm -m "${segment##* }"
	fi
	cd /
	rm -rf "$folder"
}

folder=$(mktemp -d "${TMPDIR:-/tmp}/pgtest.XXXXXX" 2>/dev/null) ||
	folder=$(mktemp -d /tmp/pgtest.XXXXXX) || exit 1
trap clean EXIT
trap 'exit 1' HUP INT TERM
cd "$folder" || exit 1
echo "folder $folder"
exec 2>>log

while read -r verb arguments; do
	case $verb in
	run)
		# shellcheck disable=SC2086 # split on purpose
		set -- $arguments
		program=$1
		shift
		"$bin/$program" "$@" </dev/null >>log 2>&1
		echo "ran $?"
		;;
	copy)
		cp -R "$arguments/data" data </dev/null >>log 2>&1
		echo "ran $?"
		;;
	start)
		# Every process of the server inherits descriptor 9; the pipe's reader
		# sees the end of file when the last of them has ended.
		rm -f alive
		mkfifo alive
		(
			cat <alive >/dev/null
			echo gone
		) &
		exec 9>alive
		"$bin/postgres" -D data </dev/null >>log 2>&1 &
		postmaster=$!
		# Said while descriptor 9 is open here, too: "gone" can't overtake it.
		echo "started $postmaster"
		exec 9>&-
		rm -f alive
		;;
	reap)
		wait "$postmaster"
		code=$?
		postmaster=
		echo "exited $code"
		;;
	esac
done
