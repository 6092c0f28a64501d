/* Where a convolution's copied inputs lie, for numbers and for bytes alike.

Law: each weight of a block has one offset, from where the block's copy begins (or the image, which is not copied where
the kernel has one place); all blocks are alike. */

#ifndef SECATEUR_PLANES_H
#define SECATEUR_PLANES_H

#include "threads.h"

#include <stdlib.h>

/* A plane is what one column of the kernel meets in one channel. */
typedef struct {
    int32_t *table;                /* what to add for each column of the flattened weight */
    size_t *plane_of, *rows_down;  /* of each row of the kernel: its plane, and by how many rows it begins further down */
    size_t *top;                   /* of each plane: the padded row that its first output row begins with */
    size_t planes, below;          /* planes of a column of the kernel; how many rows a plane has more than its tile */
    size_t per_channel;            /* numbers of a plane */
} Planes;

typedef struct {
    size_t kernel_height, kernel_width, stride_y, dilation_y;
    size_t columns, together;   /* of the flattened weight of a group; channels of a block */
    size_t size, pitch, line;   /* numbers of a tile; from a row of the output to the next; of a line of the cache */
    size_t uncopied;            /* numbers from one plane of the image to the next where nothing is copied; else 0 */
} Geometry;

/* Rows of the kernel whose inputs lie in the same rows of the image share a plane, unless a tile is so small a part of a
row that the rows between would be most of the copy. Returns 0, or 1 where memory could not be had. */
INLINE int planes_for(Planes *p, const Geometry *g) {
    p->table = malloc((g->columns + 1) * sizeof *p->table);
    p->plane_of = calloc(3 * g->kernel_height + 1, sizeof *p->plane_of);
    if (!p->table || !p->plane_of) return 1;
    p->rows_down = p->plane_of + g->kernel_height;
    p->top = p->rows_down + g->kernel_height;
    const size_t farthest = (g->kernel_height - 1) * g->dilation_y / g->stride_y;
    const int apart = farthest * g->pitch > (g->kernel_height - 1) * g->size;
    for (size_t ky = 0; ky < g->kernel_height; ky++) {
        const size_t from = ky * g->dilation_y, top = apart ? from : from % g->stride_y;
        size_t plane = 0;
        while (plane < p->planes && p->top[plane] != top) plane++;
        if (plane == p->planes) p->top[p->planes++] = top;
        p->plane_of[ky] = plane;
        p->rows_down[ky] = apart ? 0 : from / g->stride_y;
    }
    p->below = apart ? 0 : farthest;
    p->per_channel = (g->size + p->below * g->pitch + g->line - 1) / g->line * g->line;
    const size_t of_channel = g->uncopied ? g->uncopied : g->kernel_width * p->planes * p->per_channel;
    if (of_channel > INT32_MAX / g->together) return 1; /* offsets have 32 bits */
    /* to divide for each column took longer than some layers' products */
    const size_t whole = g->together * g->kernel_height * g->kernel_width, of_block = whole < g->columns ? whole : g->columns;
    for (size_t channel = 0, at = 0; at < of_block; channel++)
        for (size_t ky = 0; ky < g->kernel_height; ky++)
            for (size_t kx = 0; kx < g->kernel_width; kx++, at++) {
                const size_t plane = (channel * g->kernel_width + kx) * p->planes + p->plane_of[ky];
                const size_t offset = g->uncopied ? channel * g->uncopied : plane * p->per_channel + p->rows_down[ky] * g->pitch;
                p->table[at] = (int32_t)offset;
            }
    for (size_t at = of_block; at < g->columns; at += of_block)
        memcpy(p->table + at, p->table, (of_block < g->columns - at ? of_block : g->columns - at) * sizeof *p->table);
    return 0;
}

INLINE void planes_freed(Planes *p) {
    free(p->table);
    free(p->plane_of);
}

#endif
