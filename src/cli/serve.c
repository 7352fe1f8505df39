/* SPDX-License-Identifier: MIT */
/* weir serve: options to configuration. */
#include "cli/cli.h"

#include "daemon/fuse.h"
#include "daemon/memory.h"
#include "daemon/serve.h"
#include "daemon/vhost.h"
#include "export/nbd/server.h"
#include "util/err.h"

static const char *const aio_names[] = { "io_uring", "native", "threads", NULL };
static const char *const primary_names[] = { "none", "metadata", "all", NULL };
static const char *const cache_names[] = { "none", "writeback", "writethrough", "directsync", "unsafe", NULL };
static const char *const logmode_names[] = { "flush", "write", NULL };
static const char *const destage_names[] = { "merged", "ordered", NULL };
static const char *const tls_names[] = { "off", "allow", "require", NULL };
static const char *const on_off[] = { "off", "on", NULL };
static const char *const sync_names[] = { "standard", "always", "disabled", NULL };

int cli_serve(int argc, char **argv)
{
	struct cli_list logs = { 0 }, names = { 0 }, nbd = { 0 }, vhost = { 0 }, fuse = { 0 }, allow = { 0 }, paths = { 0 };
	struct serve_config c = { .graph.cache_size = UINT64_MAX };
	struct err err = ERR_INIT;
	int aio = -1, cache = -1, logmode = WLOG_MODE_FLUSH, destage = WLOG_DESTAGE_MERGED, sync = VOLUME_SYNC_STANDARD,
	    primarycache = CACHE_ALL, secondarycache = CACHE_ALL, tls = -1, tls_verify_peer = true;
	uint64_t nbd_conns = 256, client_conns = 0, client_requests = 512;
	uint64_t poll_us = 0, reactors = 1, log_timeout = 5000000000ull, client_timeout = 30000000000ull;
	const struct cli_opt opts[] = {
		CLI_LIST("log", 0, "DEVICE", &logs),
		CLI_LIST("nbd", 0, "ADDRESS", &nbd),
		CLI_LIST("vhost-user", 0, "PATH", &vhost),
		CLI_LIST("fuse", 0, "FILE", &fuse),
		CLI_ENUM("tls", 0, tls_names, &tls),
		CLI_STR("tls-creds", 0, "DIR", &c.tls_creds),
		CLI_ENUM("tls-verify-peer", 0, on_off, &tls_verify_peer),
		CLI_FLAG("insecure", 0, &c.insecure),
		CLI_LIST("allow-export", 0, "NAME", &allow),
		CLI_U64("max-connections", 0, "N", &nbd_conns, 1, 4096),
		CLI_U64("client-connections", 0, "N", &client_conns, 1, 4096),
		CLI_U64("client-requests", 0, "N", &client_requests, 1, 1024),
		CLI_DURATION("client-idle", 0, "DURATION", &c.idle_ns, 0, 31 * 86400000000000ull),
		CLI_LIST("name", 0, "NAME", &names),
		CLI_FLAG("read-only", 'r', &c.graph.read_only),
		CLI_ENUM("aio", 0, aio_names, &aio),
		CLI_ENUM("cache", 0, cache_names, &cache),
		CLI_ENUM("logmode", 0, logmode_names, &logmode),
		CLI_ENUM("destage", 0, destage_names, &destage),
		CLI_ENUM("sync", 0, sync_names, &sync),
		CLI_SIZE("quota", 0, "SIZE", &c.graph.volume.quota, 1 << 20, INT64_MAX),
		CLI_SIZE("cache-size", 0, "SIZE", &c.graph.cache_size, 0, INT64_MAX),
		CLI_ENUM("primarycache", 0, primary_names, &primarycache),
		CLI_STR("cache-device", 0, "DEVICE", &c.graph.cache_device),
		CLI_SIZE("cache-device-rate", 0, "SIZE", &c.graph.cache_device_config.rate, 1 << 20, INT64_MAX),
		CLI_ENUM("secondarycache", 0, primary_names, &secondarycache),
		CLI_SIZE("log-memory", 0, "SIZE", &c.graph.log.memory, 1 << 20, INT64_MAX),
		CLI_SIZE("memory", 0, "SIZE", &c.memory, 1 << 20, INT64_MAX),
		CLI_DURATION("client-timeout", 0, "DURATION", &client_timeout, 0, 3600000000000ull),
		CLI_DURATION("log-timeout", 0, "DURATION", &log_timeout, 0, 3600000000000ull),
		CLI_STR("user", 0, "USER", &c.user),
		CLI_FLAG("no-sandbox", 0, &c.no_sandbox),
		CLI_LIST("allow-path", 0, "PATH", &paths),
		CLI_STR("control", 0, "PATH", &c.control),
		CLI_STR("pid-file", 0, "FILE", &c.pid_file),
		CLI_FLAG("drain", 0, &c.drain),
		CLI_FLAG("exit-unmounted", 0, &c.exit_unmounted),
		CLI_U64("poll-us", 0, "MICROSECONDS", &poll_us, 0, 1000000),
		CLI_U64("reactors", 0, "N", &reactors, 1, SERVE_REACTORS_MAX),
		CLI_FLAG("discard-log", 0, &c.graph.volume.discard_log),
		CLI_FLAG("force-replay", 0, &c.graph.volume.force_replay),
		CLI_END
	};
	char **disks = cli_parse("serve", opts, "DISK...", argc, argv);

	if (!nbd.n && !vhost.n && !fuse.n)
		cli_usage("serve", "nothing would be served: give --nbd unix:PATH, --nbd HOST:PORT, --vhost-user PATH or --fuse FILE");
	if (c.exit_unmounted && !fuse.n)
		cli_usage("serve", "--exit-unmounted needs --fuse FILE");
	for (int i = 0; i < nbd.n; i++)
		if (nbd_server_check_address(nbd.v[i], &err) < 0)
			cli_usage("serve", "--nbd: %s", err.msg);
	for (int i = 0; i < vhost.n; i++)
		if (vhost_check_option(vhost.v[i], &err) < 0)
			cli_usage("serve", "--vhost-user: %s", err.msg);
	for (int i = 0; i < fuse.n; i++)
		if (fuse_check_option(fuse.v[i], &err) < 0)
			cli_usage("serve", "--fuse: %s", err.msg);
	if (allow.n && !nbd.n)
		cli_usage("serve", "--allow-export concerns NBD: give --nbd ADDRESS");
	if (tls < 0)
		tls = c.tls_creds ? NBD_TLS_REQUIRE : NBD_TLS_OFF;
	if (tls != NBD_TLS_OFF && !c.tls_creds)
		cli_usage("serve", "--tls %s needs certificates or keys: give --tls-creds DIR", tls_names[tls]);
	if (tls != NBD_TLS_OFF && !nbd.n)
		cli_usage("serve", "--tls and --tls-creds concern NBD: give --nbd ADDRESS");
	if (!logs.n && (c.drain || c.graph.volume.force_replay || c.graph.volume.quota || c.graph.log.memory))
		cli_usage("serve", "--drain, --force-replay, --quota and --log-memory concern a log: give --log DEVICE");
	if (c.graph.cache_device && !c.graph.cache_size)
		cli_usage("serve", "--cache-device is a second level of the cache: give a --cache-size");
	if (!c.graph.cache_device && (c.graph.cache_device_config.rate || secondarycache != CACHE_ALL))
		cli_usage("serve", "--cache-device-rate and --secondarycache concern the second level of the cache: give --cache-device DEVICE");
	while (disks[c.graph.ndisks])
		c.graph.ndisks++;
	c.graph.nlogs = logs.n;
	memory_defaults(&c, c.memory, c.graph.cache_size != UINT64_MAX);
	c.graph.disks = (const char *const *)disks;
	c.graph.names = names.v;
	c.graph.nnames = names.n;
	c.graph.logs = logs.v;
	c.graph.sync = sync;
	c.graph.primarycache = primarycache;
	c.graph.secondarycache = secondarycache;
	c.graph.log.read_only = c.graph.read_only;
	c.graph.log.relic_dir = wlog_relic_dir();
	c.client_ns = client_timeout ? client_timeout : UINT64_MAX;
	c.graph.log.side_timeout_ns = log_timeout ? log_timeout : UINT64_MAX;
	c.graph.volume.mode = logmode;
	c.graph.volume.volatile_from_start = sync == VOLUME_SYNC_DISABLED;
	c.graph.volume.destage = destage;
	c.allow = allow.v;
	c.nallow = allow.n;
	c.allow_paths = paths.v;
	c.nallow_paths = paths.n;
	c.nbd_conns = nbd_conns;
	c.client_conns = client_conns;
	c.client_requests = client_requests;
	c.tls = tls;
	c.tls_any_client = !tls_verify_peer;
	c.nbd = nbd.v;
	c.nnbd = nbd.n;
	c.vhost = vhost.v;
	c.nvhost = vhost.n;
	c.fuse = fuse.v;
	c.nfuse = fuse.n;
	c.aio = aio < 0 ? NULL : aio_names[aio];
	c.cache = cache < 0 ? NULL : cache_names[cache];
	c.poll_ns = poll_us * 1000;
	c.reactors = (unsigned)reactors;
	return serve_run(&c, &err) < 0 ? cli_fail("serve", &err) : 0;
}
