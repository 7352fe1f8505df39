#!/bin/sh
# SPDX-License-Identifier: MIT
# The manual pages have no fault that mandoc knows. usage: test_man.sh PAGE...
if ! command -v mandoc >/dev/null; then
	echo "skipped: mandoc is not installed"
	exit 77
fi
# Our own pages are not installed where the test runs, so that references among them look broken.
# What it finds goes to its standard output; a complaint about its own database would come in the middle of a line of that.
found=$(mandoc -Tlint "$@" 2>/dev/null | grep -v 'referenced manual not found')
[ -z "$found" ] && exit 0
echo "$found"
exit 1
