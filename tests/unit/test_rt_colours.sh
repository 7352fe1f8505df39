#!/bin/sh
# SPDX-License-Identifier: MIT
# The compiler holds the colours: clang refuses a plain function that calls what may suspend.
# usage: test_rt_colours.sh SOURCE-ROOT
src=$1/src
cc=$(command -v clang-14 || command -v clang) || { echo "skipped: clang is not installed"; exit 77; }
flags="-std=gnu17 -D_GNU_SOURCE -I$src -Wthread-safety -Werror=thread-safety -fsyntax-only -x c -"

compiles() {
	printf '%s\n' '#include "rt/io.h"' '#include "rt/sync.h"' "$1" | $cc $flags 2>&1
}

good='co_fn void co_f(struct co_mutex *m); co_fn void co_f(struct co_mutex *m) { co_mutex_lock(m); co_yield(); co_mutex_unlock(m); }
void g(void); void g(void) { co_spawn("f", (co_entry *)co_f, NULL); }'
if ! out=$(compiles "$good"); then
	echo "a correct program is refused: $out"
	exit 1
fi

for call in 'co_yield()' 'co_sleep_ns(1)' 'co_mutex_lock(0)' 'co_io_fsync(0, 1)' 'co_offload(0, 0)' 'co_group_wait(0)'; do
	if out=$(compiles "void f(void); void f(void) { $call; }"); then
		echo "$call from a plain function is not refused"
		exit 1
	fi
	case $out in
	*"requires holding role"*) ;;
	*) echo "$call: refused for another reason: $out"; exit 1 ;;
	esac
done
