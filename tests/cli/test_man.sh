#!/bin/sh
# SPDX-License-Identifier: MIT
# The manual pages have no fault that mandoc knows. usage: test_man.sh PAGE...
if ! command -v mandoc >/dev/null; then
	echo "skipped: mandoc is not installed"
	exit 77
fi
# Our own pages are not installed where the test runs, so that references among them look broken.
found=$(mandoc -Tlint "$@" 2>&1 | grep -v -e 'referenced manual not found' -e 'outdated mandoc.db')
[ -z "$found" ] && exit 0
echo "$found"
exit 1
