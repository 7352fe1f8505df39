/* SPDX-License-Identifier: MIT */
/* The files below a DISK string. */
#include "daemon/chain.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blk/spec.h"
#include "format/qcow2/format.h"
#include "util/bytes.h"

/* False if the file is none, or there is no place for it. Returns it open. */
static bool add_file(struct chain *c, const char *path, int *ret_fd)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return false;
	if (c->n == CHAIN_MAX || fstat(fd, &st) < 0 || (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))) {
		close(fd);
		return false;
	}
	c->file[c->n].dev = st.st_dev;
	c->file[c->n++].ino = st.st_ino;
	*ret_fd = fd;
	return true;
}

static bool read_header(int fd, struct qcow2_header *h)
{
	uint8_t head[QCOW2_V2_HEADER_LEN], *buf;
	uint32_t need = 0;
	ssize_t n = pread(fd, head, sizeof(head), 0);
	bool ok;

	if (n != (ssize_t)sizeof(head) || qcow2_header_probe(head, sizeof(head), "", &need, NULL))
		return false;
	buf = malloc(need);
	n = buf ? pread(fd, buf, need, 0) : -1;
	ok = n > 0 && !qcow2_header_parse(buf, (size_t)n, "", QCOW2_PARSE_LAX, h, NULL);
	free(buf);
	return ok;
}

/* Steps from the image at `path` to its backing file, whose path replaces it. */
static bool step_down(struct chain *c, char path[static PATH_MAX], bool *qcow2)
{
	struct qcow2_header h = { 0 };
	char *slash = strrchr(path, '/');
	size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
	bool more;
	int fd;

	if (!add_file(c, path, &fd))
		return false;
	more = *qcow2 && read_header(fd, &h) && h.backing_file;
	close(fd);
	if (more) {
		folder = *h.backing_file == '/' ? 0 : folder;
		more = folder + strlen(h.backing_file) < PATH_MAX;
		if (more)
			strcpy(path + folder, h.backing_file);
		/* Without a format the driver may have been told one: then it is worth a look. */
		*qcow2 = !h.backing_format || !strcmp(h.backing_format, "qcow2");
	}
	qcow2_header_fini(&h);
	return more;
}

void chain_look(const char *disk, struct chain *ret)
{
	struct disk_spec *spec, *s;
	const char *format, *dot;
	char path[PATH_MAX];
	bool qcow2;

	ret->n = 0;
	if (disk_spec_parse(disk, &spec, NULL) < 0)
		return;
	for (s = spec; s->inner; s = s->inner)
		;
	format = opts_str(&s->opts, "format");
	dot = strrchr(s->rest, '.');
	qcow2 = format ? !strcmp(format, "qcow2") : dot && !strcmp(dot, ".qcow2");
	if (!strcmp(s->driver, "file") && strlen(s->rest) < sizeof(path)) {
		strcpy(path, s->rest);
		while (step_down(ret, path, &qcow2))
			;
	}
	disk_spec_free(spec);
}

int chain_share(const struct chain *a, const struct chain *b)
{
	for (unsigned i = 0; i < a->n; i++)
		for (unsigned k = 0; k < b->n; k++)
			if (a->file[i].dev == b->file[k].dev && a->file[i].ino == b->file[k].ino)
				return 1;
	return 0;
}
