/* SPDX-License-Identifier: MIT */
/*
 * Function colours, checked by clang's -Wthread-safety (gcc ignores them).
 *
 * A capability is used as a role: who runs as a coroutine holds `co_role`. A function that may suspend is
 * declared `co_fn` and has `co_` in its name; calling it from a plain function is a warning, and an error
 * in CI. An entry function that the runtime calls is declared `co_fn` too. Calls through pointers are not
 * checked, which is why each op of a table has a typed wrapper.
 */
#pragma once

#if defined(__clang__)
#define ROLE_ATTR(x) __attribute__((x))
#else
#define ROLE_ATTR(x)
#endif

struct ROLE_ATTR(capability("role")) role {
	char unused;
};

extern struct role co_role;

#define co_fn ROLE_ATTR(requires_capability(co_role))

/* On a function pointer co_fn is only a note to the reader: clang 14 ignores it there. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wignored-attributes"
#endif

/* For the few places that know better (the runtime's own trampolines). */
#define co_role_unchecked ROLE_ATTR(no_thread_safety_analysis)
