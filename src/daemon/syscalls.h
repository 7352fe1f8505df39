/* SPDX-License-Identifier: MIT */
/* The system calls that a serving process makes once all is open. */
#pragma once

#include <stdbool.h>

struct err;

/*
 * For all threads. Another call fails with EPERM, and the first of its kind is told on standard error. *done is false in a build
 * without libseccomp, which is a warning.
 */
int restrict_calls(bool *done, struct err *err);

/* For all threads, if some are a library's, whose calls nobody knows: what none has any business with fails with EPERM, and nothing is told. *done as above. */
int forbid_calls(bool *done, struct err *err);
