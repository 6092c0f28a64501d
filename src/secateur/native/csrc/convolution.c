/* Convolutions with a sparse weight, in plain C: y = W * x + bias, and what follows it in the same store.

Law: no intrinsics and no state; a call writes y and nothing else, and several threads may call at once. What is read is
what the caller has validated: every index and pointer before, and a geometry whose sizes agree.

The places of an output lie in one run, row after row, and a *tile* is a piece of it: some vectors. For a tile the inputs
of a *block* of channels are copied side by side, once for each column of the kernel, such that the inputs of one weight
for all places of the tile are one run too, of the width of the output: no place is computed in vain, and where the
width is a multiple of the vector's, loads are aligned. Padding is zeros in the copy; strides and dilations are in what is
copied and in the offset of each weight. The copy of a block fits the first caches, and all outputs meet it there. A
kernel of one place with stride 1 needs no copy. */

#include "activations.h"
#include "planes.h"
#include "threads.h"

#include <stdlib.h>

enum { LINE = 16 }; /* numbers in a line of the cache */

typedef struct {
    const uint16_t *indices;  /* the column of each kept weight in its group's part of the flattened weight */
    const uint32_t *pointers; /* where the entries of each row begin in each block of channels; and the end */
    const void *values;       /* of a kind */
    const float *scales;      /* of int8 values: what each output is multiplied by, before the bias */
    const float *bias;        /* or NULL */
    const float *addend;      /* like y, added to it, or y itself; or NULL */
    const float *x;           /* (images, channels, height, width) */
    float *y;                 /* (images, rows, out_height, out_width) */
    size_t images, channels, height, width, rows, out_height, out_width;
    size_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left;
    size_t groups, together; /* channels of a group that are a block */
    size_t wide; /* numbers in a vector, or 0 for what suits the processor */
    size_t shared; /* consecutive outputs that share the places of their kept weights: 1 or 4 */
    size_t x_plane, y_plane, addend_plane; /* numbers from one plane to the next, as many as it has places or more */
    int kind, activation; /* kind: of the values */
} Convolution;

/* Some outputs at one tile, over one block of channels. */
typedef struct {
    const uint16_t *indices;
    const uint32_t *pointers; /* of this block's rows, row 0 of all first */
    const void *values;
    const float *scales, *bias, *addend, *x; /* x: where the tile begins */
    const int32_t *table;           /* what to add to x for each column of the flattened weight */
    float *y, *partial;             /* of this image; sums over the blocks before */
    size_t first_row, end_row, y_plane, addend_plane;
    size_t start, skip, count; /* of the tile's places, those from skip to count are ours */
    const size_t *to;     /* where the output has each vector, if rows are longer here; else NULL */
    size_t vectors, last; /* how many of them there are, and how many numbers of the last */
    int is_first, is_last, activation;
    size_t size, end; /* numbers of the tile; and how many there are at most to be read from where it begins */
    int kind;    /* of values. Where outputs share places, a row is 4 outputs */
} Block;

#define UP_TO_2(EACH) EACH(1) EACH(2)
#define UP_TO_3(EACH) UP_TO_2(EACH) EACH(3)
#define UP_TO_5(EACH) UP_TO_3(EACH) EACH(4) EACH(5)
#define UP_TO_6(EACH) UP_TO_5(EACH) EACH(6)
#define UP_TO_12(EACH) EACH(1) EACH(2) EACH(3) EACH(4) EACH(5) EACH(6) EACH(7) EACH(8) EACH(9) EACH(10) EACH(11) EACH(12)
#define UP_TO_14(EACH) UP_TO_12(EACH) EACH(13) EACH(14)

#define AS_IS(name) name
#define OF_16(name) name##_16

/* Numbers in a vector of the processor. With AVX-512 there are vectors of 8 numbers, too: images of 7×7 fill them. There
are registers for twice as many vectors, but with tiles of more than 14 vectors of 16 a Zen 4 was slower by up to a
seventh: the inputs of a block no longer stay near. */
#if defined(__AVX512F__)
enum { MOST_TILE = 14, MOST_SHARED_TILE = 28, MOST_PIECE = 6 };
#define TILES UP_TO_14
#define PIECES UP_TO_6
#define WIDE 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31
#define NAMED OF_16
#include "convolution_tiles.h"
#include "shared_tiles.h"
#undef WIDE
#undef EVENS
#undef NAMED
#else
enum { MOST_TILE = 12, MOST_SHARED_TILE = 12 };
#define TILES UP_TO_12
#if defined(__aarch64__) /* of 6 gcc's order of instructions keeps sums in memory */
enum { MOST_PIECE = 5 };
#define PIECES UP_TO_5
#elif defined(__AVX2__)
enum { MOST_PIECE = 3 };
#define PIECES UP_TO_3
#else /* where a multiplication and a sum take a register between them */
enum { MOST_PIECE = 2 };
#define PIECES UP_TO_2
#endif
#endif
#if defined(__AVX2__)
#define WIDE 8
#define EVENS 0, 2, 4, 6, 9, 11, 13, 15
#else
#define WIDE 4
#define EVENS 0, 2, 5, 7
#endif
#define NAMED AS_IS
#include "convolution_tiles.h"
#include "shared_tiles.h"

/* ------------------------------------------------------------------------------------------------------ the plan */

/* How all tiles of a convolution are computed. */
typedef struct {
    const Convolution *c;
    Planes copies;
    size_t blocks, tiles, size, wide; /* blocks; tiles of an image; numbers of one; of a vector */
    size_t pitch, places; /* numbers from a row of the output to the next, and of all rows */
    int is_direct;
    void (*outputs)(const Block *); /* what computes a tile */
    void (*copied)(const float *, const int32_t *, const float *, size_t, float *); /* and copies a plane */
} Plan;

typedef struct {
    const Plan *plan;
    size_t first, end, first_row, end_row; /* tiles of all images; outputs */
    int failed;
} Part;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t over(size_t a, size_t b) { return (a + b - 1) / b; }

/* How many vectors a tile has: as many as leave the fewest places of the last tile empty, where what a weight costs by
itself is about that of a third of a vector, or of one where four outputs share it. */
static size_t tile_for(const Convolution *c, size_t places, size_t wide) {
    const size_t vectors = over(places, wide), most = c->shared > 1 ? MOST_SHARED_TILE : MOST_TILE, cost_of_one = c->shared > 1 ? 1 : 3;
    size_t best = 1, best_cost = SIZE_MAX;
    for (size_t tile = 1; tile <= most; tile++) {
        size_t cost = over(vectors, tile) * (cost_of_one * tile + 1);
        if (cost <= best_cost) best = tile, best_cost = cost;
    }
    return best;
}

/* Where the kernel has several rows, loads are aligned if the rows are multiples of a vector. Rows of 7 and 14 places, and
the like, are made so; of 28 the places in vain (of 32) took more than it gave. */
static size_t pitch_for(const Convolution *c, size_t wide) {
    if (c->shared > 1) return c->out_width; /* see shared_tiles.h */
    const size_t pitch = over(c->out_width, wide) * wide;
    const int is_worth = c->kernel_height > 1 && c->stride_x == 1 && 7 * pitch <= 8 * c->out_width && pitch <= 16;
    return is_worth ? pitch : c->out_width;
}

/* 16 if vectors of so many are compiled, and asked for, or the image has more than a few of them, or its rows need not be
multiples of one. */
static size_t width_for(const Convolution *c) {
#if defined(__AVX512F__)
    if (c->wide) return c->wide == 16 ? 16 : 8;
    return c->out_height * c->out_width > 64 || c->kernel_height == 1 ? 16 : WIDE;
#else
    (void)c;
    return WIDE;
#endif
}

static int plan_for(Plan *p, const Convolution *c) {
    const size_t columns = c->channels / c->groups * c->kernel_height * c->kernel_width;
    const size_t wide = width_for(c), pitch = pitch_for(c, wide), places = c->out_height * pitch;
    const size_t tile = tile_for(c, places, wide);
    *p = (Plan){.c = c, .pitch = pitch, .places = places, .blocks = over(c->channels / c->groups, c->together), .size = tile * wide, .wide = wide};
    p->outputs = c->shared > 1 ? pieces : OUTPUTS[tile - 1][c->kind];
    p->copied = vectors_copied;
#if defined(__AVX512F__)
    if (wide == 16) p->outputs = c->shared > 1 ? pieces_16 : OUTPUTS_16[tile - 1][c->kind], p->copied = vectors_copied_16;
#endif
    p->tiles = over(places, p->size);
    p->is_direct = c->kernel_height == 1 && c->kernel_width == 1 && c->stride_y == 1 && c->stride_x == 1 && !c->top &&
                   !c->left && c->out_height == c->height && c->out_width == c->width &&
                   (c->shared > 1 ? c->x_plane >= MOST_PIECE * wide : c->x_plane >= p->size && c->x_plane % wide == 0);
    return planes_for(&p->copies, &(Geometry){.kernel_height = c->kernel_height, .kernel_width = c->kernel_width,
                      .stride_y = c->stride_y, .dilation_y = c->dilation_y, .columns = columns, .together = c->together,
                      .size = p->size, .pitch = pitch, .line = LINE, .uncopied = p->is_direct ? c->x_plane : 0});
}

/* ------------------------------------------------------------------------------------------------------ the copy */

/* What one plane of a channel's copy is of: `top` is the row of the image for the output row 0, `shift` its column for the
output column 0, [low, high) the columns of the output whose input lies in the image. */
typedef struct {
    ptrdiff_t top, shift, low, high;
    ptrdiff_t first; /* of the vectors that `Whole` has: what to add to their places */
    int is_masked;   /* whether padding is among them */
} View;

/* How all channels are copied for one tile. Where the places of a vector of the output lie side by side in the image,
they are read at once and what is padding is masked; near the ends of all images that would read beyond them. */
typedef struct {
    View *views;        /* of each plane */
    int32_t *places;    /* where the image has each vector of a plane, before the plane's `first` */
    float *masks;       /* of all planes, as they are copied: bits that are set where there is an input */
    size_t count;       /* of planes */
    size_t start;       /* the tile's first place */
    ptrdiff_t low, high; /* what is read of a channel's image from its first number, and where that ends */
    int is_whole;       /* whether vectors lie side by side */
} Copying;

INLINE void zeros(float *out, ptrdiff_t count) {
    if (count > 0) memset(out, 0, (size_t)count * sizeof *out);
}

/* `count` numbers, every second from `from` on; nothing after the last of them is read. */
INLINE void every_second(const float *restrict from, ptrdiff_t count, float *restrict to) {
#if defined(__AVX512F__)
    if (count >= 16) {
        every_second_wide_16(from, count, to);
        return;
    }
#endif
    if (count >= WIDE) every_second_wide(from, count, to);
    else
        for (ptrdiff_t j = 0; j < count; j++) to[j] = from[2 * j];
}

/* `count` places from place `start` of the output on, row by row: for any width and stride. */
static void copy_rows(const Plan *p, const View *v, const float *image, size_t start, ptrdiff_t count, float *restrict out) {
    const Convolution *c = p->c;
    const ptrdiff_t across = (ptrdiff_t)p->pitch, width = (ptrdiff_t)c->width, stride = (ptrdiff_t)c->stride_x;
    ptrdiff_t row = (ptrdiff_t)start / across, column = (ptrdiff_t)start % across;
    for (ptrdiff_t done = 0, end; done < count; done += end - column, row++, column = 0) {
        const ptrdiff_t from = row * (ptrdiff_t)c->stride_y + v->top;
        float *to = out + done - column; /* column 0, be it there or not */
        end = across - column < count - done ? across : column + count - done;
        ptrdiff_t low = v->low > column ? v->low : column, high = v->high < end ? v->high : end;
        if (low > end) low = end;
        if (from < 0 || from >= (ptrdiff_t)c->height) high = low = end;
        if (high < low) high = low;
        for (ptrdiff_t j = column; j < low; j++) to[j] = 0;
        for (ptrdiff_t j = high; j < end; j++) to[j] = 0;
        if (high == low) continue;
        const float *line = image + from * width + v->shift + low * stride;
        if (stride == 1) memcpy(to + low, line, (size_t)(high - low) * sizeof *to);
        else if (stride == 2) every_second(line, high - low, to + low);
        else
            for (ptrdiff_t j = low; j < high; j++) to[j] = line[(j - low) * stride];
    }
}

/* The bits of `count` places from place `start` on: set where there is an input. */
static int mask_for(const Plan *p, const View *v, size_t start, ptrdiff_t count, float *mask) {
    const ptrdiff_t across = (ptrdiff_t)p->pitch;
    ptrdiff_t row = (ptrdiff_t)start / across, column = (ptrdiff_t)start % across;
    int is_masked = 0;
    memset(mask, 255, (size_t)count * sizeof *mask);
    for (ptrdiff_t done = 0, end; done < count; done += end - column, row++, column = 0) {
        const ptrdiff_t from = row * (ptrdiff_t)p->c->stride_y + v->top;
        float *to = mask + done - column;
        end = across - column < count - done ? across : column + count - done;
        ptrdiff_t low = v->low < end ? v->low : end, high = v->high > column ? v->high : column;
        if (from < 0 || from >= (ptrdiff_t)p->c->height) high = low = column;
        is_masked |= low > column || high < end;
        zeros(to + column, low - column);
        zeros(to + high, end - high);
    }
    return is_masked;
}

static void copying_for(const Plan *p, size_t start, Copying *k) {
    const Convolution *c = p->c;
    const ptrdiff_t count = (ptrdiff_t)(p->size + p->copies.below * p->pitch), stride = (ptrdiff_t)c->stride_x;
    const ptrdiff_t across = (ptrdiff_t)p->pitch, width = (ptrdiff_t)c->width;
    const size_t vectors = over((size_t)count, p->wide), first = start / p->wide, in_row = p->pitch / p->wide;
    const int is_run = c->stride_x == 1 && c->stride_y == 1 && c->width == p->pitch;
    k->start = start;
    k->is_whole = is_run || p->pitch != c->out_width;
    ptrdiff_t least_first = PTRDIFF_MAX, most_first = PTRDIFF_MIN;
    for (size_t kx = 0, n = 0; kx < c->kernel_width; kx++)
        for (size_t plane = 0; plane < p->copies.planes; plane++, n++) {
            View *v = k->views + n;
            v->top = (ptrdiff_t)p->copies.top[plane] - (ptrdiff_t)c->top;
            v->shift = (ptrdiff_t)(kx * c->dilation_x) - (ptrdiff_t)c->left;
            v->low = v->shift < 0 ? (stride - 1 - v->shift) / stride : 0;
            v->high = width > v->shift ? (width - v->shift + stride - 1) / stride : 0;
            if (v->low > across) v->low = across;
            if (v->high > across) v->high = across;
            if (v->high < v->low) v->high = v->low;
            v->first = v->top * width + v->shift;
            if (v->first < least_first) least_first = v->first;
            if (v->first > most_first) most_first = v->first;
            if (k->is_whole) v->is_masked = mask_for(p, v, start, count, k->masks + n * p->copies.per_channel);
        }
    for (size_t n = 0; n < vectors && k->is_whole; n++) {
        const size_t row = is_run ? 0 : (first + n) / in_row, column = is_run ? first + n : (first + n) % in_row;
        const size_t place = row * c->stride_y * c->width + column * p->wide;
        k->places[n] = (int32_t)place;
        if (place > INT32_MAX) k->is_whole = 0;
    }
    if (!k->is_whole) return;
    k->low = least_first + k->places[0];
    k->high = most_first + k->places[vectors - 1] + (ptrdiff_t)p->wide;
}

/* The inputs of a block of channels for the tile that `k` is of. */
static void copy_block(const Plan *p, const Copying *k, const float *image, size_t channels, float *out) {
    const Convolution *c = p->c;
    const ptrdiff_t count = (ptrdiff_t)(p->size + p->copies.below * p->pitch);
    const ptrdiff_t numbers = (ptrdiff_t)(c->images * c->channels * c->x_plane);
    for (size_t channel = 0; channel < channels; channel++, image += c->x_plane) {
        const ptrdiff_t at = image - c->x;
        const int is_inside = k->is_whole && at + k->low >= 0 && at + k->high <= numbers;
        for (size_t n = 0; n < k->count; n++, out += p->copies.per_channel) {
            const View *v = k->views + n;
            if (is_inside) p->copied(image + v->first, k->places, v->is_masked ? k->masks + n * p->copies.per_channel : NULL, (size_t)count, out);
            else copy_rows(p, v, image, k->start, count, out);
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- the tiles */

static void part_freed(void *memory, Copying *k) {
    free(memory);
    free(k->views);
    free(k->places);
}

static void *convolution_part(void *argument) {
    Part *part = argument;
    const Plan *p = part->plan;
    const Convolution *c = p->c;
    /* what may be read of a plane and written of one: where planes lie apart, what is between them, too */
    const size_t readable = c->x_plane, apart = c->addend && c->addend_plane < c->y_plane ? c->addend_plane : c->y_plane;
    const size_t writable = p->pitch != c->out_width ? p->places : p->is_direct ? least(apart, readable) : apart;
    const size_t group_channels = c->channels / c->groups;
    const size_t rows = c->rows / c->shared, group_rows = rows / c->groups;
    const size_t planes = p->is_direct ? 0 : c->kernel_width * p->copies.planes, copied = planes * p->copies.per_channel;
    void *memory = malloc((c->together * copied + copied + group_rows * c->shared * p->size + 2 * LINE) * sizeof(float));
    Copying copying = {.views = malloc((planes + 1) * sizeof(View)), .places = malloc((p->copies.per_channel + 1) * sizeof(int32_t)), .count = planes};
    part->failed = !memory || !copying.views || !copying.places;
    if (part->failed) {
        part_freed(memory, &copying);
        return NULL;
    }
    float *copy = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    float *partial = copy + c->together * copied + copied;
    copying.masks = copy + c->together * copied;
    for (size_t n = part->first; n < part->end; n++) {
        const size_t image = n / p->tiles, own = n % p->tiles * p->size;
        /* the last tile begins earlier rather than to read beyond the image; or its last piece does */
        const size_t start = p->is_direct && c->shared == 1 && own + p->size > readable ? readable - p->size : own;
        size_t to[MOST_TILE];
        Block b = {.indices = c->indices, .values = c->values, .scales = c->scales, .bias = c->bias, .table = p->copies.table, .partial = partial,
                   .y_plane = c->y_plane, .addend_plane = c->addend_plane,
                   .start = start, .skip = own - start, .count = least(p->size, writable - start),
                   .y = c->y + image * c->rows * c->y_plane, .activation = c->activation,
                   .addend = c->addend ? c->addend + image * c->rows * c->addend_plane : NULL,
                   .size = p->size, .end = p->is_direct ? readable - start : SIZE_MAX, .kind = c->kind};
        if (p->pitch != c->out_width) {
            b.to = to;
            for (size_t at = start; at < start + b.count; at += p->wide) {
                const size_t row = at / p->pitch, column = at % p->pitch;
                to[b.vectors++] = row * c->out_width + column;
                b.last = least(p->wide, c->out_width - column);
            }
        }
        if (!p->is_direct && (n == part->first || start != copying.start)) copying_for(p, start, &copying);
        for (size_t group = 0; group < c->groups; group++) {
            b.first_row = group * group_rows > part->first_row ? group * group_rows : part->first_row;
            b.end_row = least((group + 1) * group_rows, part->end_row);
            for (size_t block = 0; block < p->blocks && b.first_row < b.end_row; block++) {
                const size_t first = block * c->together;
                const float *channels = c->x + (image * c->channels + group * group_channels + first) * c->x_plane;
                if (!p->is_direct) copy_block(p, &copying, channels, least(c->together, group_channels - first), copy);
                b.x = p->is_direct ? channels + start : copy;
                b.pointers = c->pointers + block * rows;
                b.is_first = block == 0;
                b.is_last = block + 1 == p->blocks;
                p->outputs(&b);
            }
        }
    }
    part_freed(memory, &copying);
    return NULL;
}

/* Tiles are shared among threads; where there are too few of them, outputs are. */
static int convolved(const Convolution *c, size_t threads) {
    Part parts[MOST_THREADS];
    Plan plan;
    int failed = plan_for(&plan, c);
    const size_t all = plan.tiles * c->images;
    size_t count = 0, rows = c->rows / c->shared;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    size_t across = all % threads == 0 || all >= 4 * threads ? 1 : least(threads, rows);
    size_t along = across > 1 ? 1 : least(threads, all);
    for (size_t n = 0; n < along && !failed; n++)
        for (size_t r = 0; r < across; r++)
            parts[count++] = (Part){&plan, all * n / along, all * (n + 1) / along, rows * r / across,
                                    rows * (r + 1) / across, 0};
    secateur_in_threads(convolution_part, parts, sizeof *parts, count);
    for (size_t n = 0; n < count; n++) failed |= parts[n].failed;
    planes_freed(&plan.copies);
    return failed;
}

/* Returns 0, or 1 where memory could not be had. `sizes`: images, channels, height, width, rows, out_height, out_width,
kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left, groups, together, activation,
wide, shared. All are at least 1 but for top, left, activation and wide. Where `shared` outputs share places, so many
rows are one to indices and pointers, and a place has as many values side by side; a group has a multiple of them.
Planes of x, y and addend may lie apart, by so many numbers; 0 if they do not. What is between those of y is written. */
EXPORT int secateur_convolution(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *scales, const float *bias,
                                const float *addend, const float *x, float *y, const size_t *sizes, size_t x_plane,
                                size_t y_plane, size_t addend_plane, int kind, size_t threads) {
    const size_t places = sizes[2] * sizes[3], made = sizes[5] * sizes[6];
    Convolution c = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .addend = addend, .x = x,
                     .y = y, .images = sizes[0], .channels = sizes[1], .height = sizes[2], .width = sizes[3],
                     .rows = sizes[4], .out_height = sizes[5], .out_width = sizes[6], .kernel_height = sizes[7],
                     .kernel_width = sizes[8], .stride_y = sizes[9], .stride_x = sizes[10], .dilation_y = sizes[11],
                     .dilation_x = sizes[12], .top = sizes[13], .left = sizes[14], .groups = sizes[15],
                     .together = sizes[16], .kind = kind, .activation = (int)sizes[17], .wide = sizes[18], .shared = sizes[19],
                     .x_plane = x_plane > places ? x_plane : places, .y_plane = y_plane > made ? y_plane : made,
                     .addend_plane = addend_plane > made ? addend_plane : made};
    return convolved(&c, threads);
}
