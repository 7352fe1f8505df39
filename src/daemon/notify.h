/* SPDX-License-Identifier: MIT */
/*
 * The service manager's readiness protocol (sd_notify(3)): datagrams to the socket in NOTIFY_SOCKET.
 */
#pragma once

/* Sends a state such as "READY=1\nSTATUS=...". Does nothing where there is no service manager; failures are ignored. */
void notify_send(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
