/* SPDX-License-Identifier: MIT */
/* Questions to a control socket. */
#include "cli/ask.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "util/err.h"

static FILE *connect_to(const char *path, struct err *err)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd, r = -ENAMETOOLONG;
	FILE *f;

	if (strlen(path) >= sizeof(addr.sun_path)) {
		err_errno(err, r, "%s", path);
		return NULL;
	}
	strcpy(addr.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	r = fd < 0 || connect(fd, (struct sockaddr *)&addr, sizeof(addr)) ? -errno : 0;
	f = r ? NULL : fdopen(fd, "r+");
	if (!f) {
		err_errno(err, r ? r : -ENOMEM, "%s: no server answers on this control socket; it is the PATH of weir serve --control", path);
		if (fd >= 0)
			close(fd);
	}
	return f;
}

static json_t *take_result(const char *path, json_t *answer, struct err *err)
{
	json_t *result = json_object_get(answer, "result");
	const char *text = json_string_value(json_object_get(answer, "error"));

	if (json_is_true(json_object_get(answer, "ok")) && result)
		return json_incref(result);
	err_set(err, -EIO, "%s: %s", path, text ? text : "the server gave no answer that makes sense");
	return NULL;
}

json_t *ask_server(const char *path, json_t *request, struct err *err)
{
	FILE *f = connect_to(path, err);
	json_t *answer, *result = NULL;
	char *line = NULL;
	size_t room = 0;

	if (f) {
		if (json_dumpf(request, f, JSON_COMPACT) || fputc('\n', f) == EOF || fflush(f) || getline(&line, &room, f) < 0) {
			err_set(err, -EPIPE, "%s: the server is gone", path);
		} else {
			answer = json_loads(line, 0, NULL);
			result = take_result(path, answer, err);
			json_decref(answer);
		}
		free(line);
		fclose(f);
	}
	json_decref(request);
	return result;
}
