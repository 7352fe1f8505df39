/* SPDX-License-Identifier: MIT */
/* Until src/wlog is there: its functions may be missing at link time. */
#pragma weak co_wlog_open
#pragma weak co_wlog_close
#pragma weak co_wlog_attach
#pragma weak co_wlog_drain
#pragma weak co_wlog_drain_volume
#pragma weak wlog_status
