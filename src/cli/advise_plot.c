/* SPDX-License-Identifier: MIT */
/* weir advise --plot: miss-ratio curves as an SVG, a line for each volume, without anything from elsewhere. */
#include "cli/advise_plot.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "util/bytes.h"
#include "util/err.h"
#include "util/size.h"

#define WIDTH 760.0
#define HEIGHT 420.0
#define LEFT 64.0
#define TOP 48.0
#define PLOT_W 500.0
#define PLOT_H 310.0
#define NAME_MOST 20u	/* characters beside the curves */
#define VOLUMES 16u	/* more would be no picture */

/* Okabe and Ito's colours, which most eyes can tell apart; then again, dashed. */
static const char *const colours[] = { "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999" };

/* At most so many characters of it. */
static void print_text(FILE *f, const char *text, unsigned most)
{
	for (unsigned n = 0; *text; text++) {
		/* What continues a character of UTF-8 is no new one. */
		n += (*text & 0xc0) != 0x80;
		if (n > most) {
			fputs("&#8230;", f);
			return;
		}
		if (*text == '&')
			fputs("&amp;", f);
		else if (*text == '<')
			fputs("&lt;", f);
		else if ((unsigned char)*text >= ' ')
			fputc(*text, f);
	}
}

static double size_of(json_t *curve)
{
	json_t *points = json_object_get(curve, "points");

	return json_number_value(json_array_get(json_array_get(points, json_array_size(points) - 1), 0));
}

static double x_of(double bytes, double most)
{
	return LEFT + PLOT_W * bytes / most;
}

static double y_of(double ratio)
{
	return TOP + PLOT_H * ratio;
}

/* A round number of bytes, so that there are four to eight marks. */
static double step_for(double most)
{
	double step = 4096;

	while (most / step > 8)
		step *= 2;
	return step;
}

/* Upwards is more hits. */
static void print_axes(FILE *f, double most)
{
	double step = step_for(most);
	char text[16];

	for (int i = 0; i <= 5; i++) {
		fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, y_of(i / 5.0), LEFT + PLOT_W, y_of(i / 5.0));
		fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%d %%</text>\n", LEFT - 8, y_of(i / 5.0) + 4, 100 - 20 * i);
	}
	for (double at = 0; at <= most; at += step) {
		fprintf(f, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", x_of(at, most), TOP, x_of(at, most), TOP + PLOT_H);
		fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n", x_of(at, most), TOP + PLOT_H + 18,
			size_format((uint64_t)at, text));
	}
	fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">memory for the volume alone</text>\n", LEFT + PLOT_W / 2, TOP + PLOT_H + 40);
	fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"15\">Reads that would hit, by size of the cache</text>\n", LEFT, TOP - 18);
}

static void print_curve(FILE *f, const char *name, json_t *curve, unsigned n, double most)
{
	const char *colour = colours[n % ARRAY_SIZE(colours)], *dash = n >= ARRAY_SIZE(colours) ? " stroke-dasharray=\"6 3\"" : "";
	json_t *points = json_object_get(curve, "points"), *p;
	double y = TOP + 8 + 20 * n;
	size_t i;

	fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"%.1f,%.1f", colour, dash, x_of(0, most), y_of(1));
	json_array_foreach(points, i, p)
		fprintf(f, " %.1f,%.1f", x_of(json_number_value(json_array_get(p, 0)), most),
			y_of(fmin(fmax(json_number_value(json_array_get(p, 1)), 0), 1)));
	/* More memory than for all that it reads changes nothing. */
	fprintf(f, " %.1f,%.1f", LEFT + PLOT_W, y_of(fmin(fmax(json_number_value(json_array_get(json_array_get(points, i - 1), 1)), 0), 1)));
	fprintf(f, "\"><title>");
	print_text(f, name, UINT_MAX);
	fprintf(f, "</title></polyline>\n<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"2\"%s/>\n",
		LEFT + PLOT_W + 16, y, LEFT + PLOT_W + 40, y, colour, dash);
	fprintf(f, "<text x=\"%.1f\" y=\"%.1f\">", LEFT + PLOT_W + 46, y + 4);
	print_text(f, name, NAME_MOST);
	fprintf(f, "</text>\n");
}

int advise_plot(const char *path, json_t *curves, struct err *err)
{
	const char *name;
	double most = 4096;
	unsigned n = 0;
	json_t *c;
	FILE *f = fopen(path, "w");

	if (!f)
		return err_errno(err, -errno, "%s: cannot be written", path);
	json_object_foreach(curves, name, c)
		most = fmax(most, size_of(c));
	fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
		"font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", WIDTH, HEIGHT, WIDTH, HEIGHT);
	print_axes(f, most);
	json_object_foreach(curves, name, c) {
		if (n == VOLUMES)
			break;
		if (json_array_size(json_object_get(c, "points")))
			print_curve(f, name, c, n++, most);
	}
	if (!n)
		fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">nothing has been read yet</text>\n", LEFT + PLOT_W / 2, TOP + PLOT_H / 2);
	fprintf(f, "</svg>\n");
	n = (unsigned)ferror(f);
	if (fclose(f) || n)
		return err_errno(err, -EIO, "%s: cannot be written", path);
	return 0;
}
