// The simulated GPU's matrix products and convolutions: FP32 sums, in the order of blocks that fit a cache.
#include <stdlib.h>
#include <string.h>

#include "dnn.h"

enum { ROWS = 8, COLUMNS = 32, DEPTH = 256, HEIGHT = 128, LANES = 16 };
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

// c[ROWS][COLUMNS] += a[depth][ROWS]^T b[depth][COLUMNS], of which so many rows and columns are wanted.
static void tile(int depth, const float *a, const float *b, float *c, long c_row, int rows, int columns) {
    Vector sums[ROWS][2] = {{{0}}};
    for (int p = 0; p < depth; p++, a += ROWS, b += COLUMNS) {
        Vector b0 = *(const Vector *)b, b1 = *(const Vector *)(b + LANES);
        for (int i = 0; i < ROWS; i++) sums[i][0] += a[i] * b0, sums[i][1] += a[i] * b1;
    }
    for (int i = 0; i < rows; i++, c += c_row) {
        if (columns == COLUMNS) {
            *(Vector *)c += sums[i][0], *(Vector *)(c + LANES) += sums[i][1];
        } else {
            const float *row = (const float *)sums[i];
            for (int j = 0; j < columns; j++) c[j] += row[j];
        }
    }
}

// Blocks of so many rows, or columns, one after the other; what is missing in the last is zero.
static void pack(float *to, int width, int count, int depth, const float *from, long step, long deeper) {
    for (int i = 0; i < count; i += width, to += (long)width * depth) {
        int real = count - i < width ? count - i : width;
        const float *at = from + i * step;
        if (real < width) memset(to, 0, (size_t)width * depth * sizeof *to);
        if (step == 1)
            for (int p = 0; p < depth; p++) memcpy(to + (long)p * width, at + p * deeper, real * sizeof *to);
        else
            for (int k = 0; k < real; k++)
                for (int p = 0; p < depth; p++) to[(long)p * width + k] = at[k * step + p * deeper];
    }
}

void multiply(int m, int n, int k, const float *a, long a_row, long a_column, const float *b, long b_row,
              long b_column, float *c, long c_row) {
    int wide = (n + COLUMNS - 1) / COLUMNS * COLUMNS;
    float *packed_b = room((size_t)wide * DEPTH), *packed_a = room(HEIGHT * DEPTH);
    for (int p = 0; p < k; p += DEPTH) {
        int depth = k - p < DEPTH ? k - p : DEPTH;
        pack(packed_b, COLUMNS, n, depth, b + p * b_row, b_column, b_row);
        for (int i = 0; i < m; i += HEIGHT) {
            int height = m - i < HEIGHT ? m - i : HEIGHT;
            pack(packed_a, ROWS, height, depth, a + i * a_row + p * a_column, a_row, a_column);
            for (int column = 0; column < n; column += COLUMNS)
                for (int row = 0; row < height; row += ROWS)
                    tile(depth, packed_a + row * depth, packed_b + (size_t)column * depth,
                         c + (i + row) * c_row + column, c_row, height - row < ROWS ? height - row : ROWS,
                         n - column < COLUMNS ? n - column : COLUMNS);
        }
    }
    free(packed_a), free(packed_b);
}

// ---- Convolutions: products of filters and unrolled windows ------------------------------------------------------

typedef struct {
    int channels, filters;  // of one group
    int in[3], window[3], out[3];
    int steps[3], pads[3], dilations[3];
} Shape;

// Of images, whose depth is 1, or of volumes.
static Shape shape_of(D x, D w, D y, D how) {
    Shape v = {x->sizes[1] / how->groups, y->sizes[1] / how->groups, {1}, {1}, {1}, {1}, {0}, {1}};
    for (int i = 2, to = 5 - x->dims; i < x->dims; i++, to++) {
        v.in[to] = x->sizes[i], v.window[to] = w->sizes[i], v.out[to] = y->sizes[i];
        v.steps[to] = how->steps[i - 2], v.pads[to] = how->pads[i - 2], v.dilations[to] = how->dilations[i - 2];
    }
    return v;
}

static long volume(const int *sides) { return (long)sides[0] * sides[1] * sides[2]; }

// One row of outputs: what its windows read at one of their places, of which ``first`` to ``end`` lie in the image.
static void unroll_row(float *row, int step, int first, int end, float *columns, int count, int back) {
    if (back && step == 1)
        for (int q = first; q < end; q++) row[q] += columns[q];
    else if (back)
        for (int q = first; q < end; q++) row[q * step] += columns[q];
    if (back) return;
    for (int q = 0; q < first; q++) columns[q] = 0;
    if (step == 1)
        for (int q = first; q < end; q++) columns[q] = row[q];
    else
        for (int q = first; q < end; q++) columns[q] = row[q * step];
    for (int q = end; q < count; q++) columns[q] = 0;
}

// columns[channels * window][out], from an image or back to its gradient.
static void unroll(const Shape *v, float *image, float *columns, int back) {
    int step = v->steps[2], wide = v->in[2], count = v->out[2];
    for (int c = 0; c < v->channels; c++, image += volume(v->in))
        for (int at = 0; at < volume(v->window); at++) {
            int from[3], rest = at;
            for (int k = 2; k >= 0; rest /= v->window[k--])
                from[k] = rest % v->window[k] * v->dilations[k] - v->pads[k];
            int left = from[2], first = left < 0 ? (step - 1 - left) / step : 0;
            int end = wide > left ? (wide - 1 - left) / step + 1 : 0;
            if (first > count) first = count;
            if (end > count) end = count;
            if (end < first) end = first;
            for (int o = 0; o < v->out[0]; o++)
                for (int p = 0; p < v->out[1]; p++, columns += count) {
                    int d = o * v->steps[0] + from[0], h = p * v->steps[1] + from[1];
                    int inside = d >= 0 && d < v->in[0] && h >= 0 && h < v->in[1];
                    float *row = image + ((long)d * v->in[1] + h) * wide + left;
                    unroll_row(row, step, inside ? first : count, inside ? end : count, columns, count, back);
                }
        }
}

void compute_convolution(int kind, D x, P x_, D w, P w_, D y, P y_, D how, P alpha, P beta) {
    if ((x->dims != 4 && x->dims != 5) || how->mode != 1) cannot("a convolution that is no cross-correlation", show(x));
    Shape v = shape_of(x, w, y, how);
    long out = volume(v.out), window = v.channels * volume(v.window);
    float *from_x = kind == BACKWARD_DATA ? zeros(count_of(x)) : take(x, x_);
    float *from_w = kind == BACKWARD_FILTER ? zeros(count_of(w)) : take(w, w_);
    float *from_y = kind == FORWARD ? zeros(count_of(y)) : take(y, y_);
    float *columns = zeros(out * window);
    for (int n = 0; n < x->sizes[0] * how->groups; n++) {
        float *image = from_x + n * v.channels * volume(v.in), *result = from_y + n * v.filters * out;
        float *filter = from_w + n % how->groups * v.filters * window;
        if (kind == BACKWARD_DATA) {
            memset(columns, 0, out * window * sizeof *columns);
            multiply(window, out, v.filters, filter, 1, window, result, out, 1, columns, out);
            unroll(&v, image, columns, 1);
            continue;
        }
        unroll(&v, image, columns, 0);
        if (kind == FORWARD)
            multiply(v.filters, out, window, filter, window, 1, columns, out, 1, result, out);
        else
            multiply(v.filters, window, out, result, out, 1, columns, 1, out, filter, window);
    }
    free(columns);
    if (kind == BACKWARD_DATA) {
        free(from_y), free(from_w);
        give(x, x_, from_x, alpha, beta);
    } else if (kind == BACKWARD_FILTER) {
        free(from_x), free(from_y);
        give(w, w_, from_w, alpha, beta);
    } else {
        free(from_x), free(from_w);
        give(y, y_, from_y, alpha, beta);
    }
}

// ---- cuBLAS: column-major C = alpha op(A) op(B) + beta C -----------------------------------------------------------

static Descriptor matrix(int dtype, int rows, int columns, int distance) {
    return (Descriptor){.dtype = dtype, .dims = 2, .sizes = {columns, rows}, .strides = {distance, 1}};
}

static void product_in_fp64(int ta, int tb, int m, int n, int k, double alpha, const double *a, long lda,
                            const double *b, long ldb, double beta, double *c, long ldc) {
    for (long j = 0; j < n; j++)
        for (long i = 0; i < m; i++) {
            double sum = 0, *to = c + j * ldc + i;
            for (long p = 0; p < k; p++) sum += a[ta ? i * lda + p : p * lda + i] * b[tb ? p * ldb + j : j * ldb + p];
            *to = alpha * sum + (beta != 0 ? beta * *to : 0);
        }
}

void compute_product(int ta, int tb, int m, int n, int k, double alpha, const void *a, int a_dtype, int lda,
                     const void *b, int b_dtype, int ldb, double beta, void *c, int c_dtype, int ldc) {
    if (a_dtype == F64) {
        product_in_fp64(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    Descriptor of_a = ta ? matrix(a_dtype, k, m, lda) : matrix(a_dtype, m, k, lda);
    Descriptor of_b = tb ? matrix(b_dtype, n, k, ldb) : matrix(b_dtype, k, n, ldb);
    Descriptor of_c = matrix(c_dtype, m, n, ldc);
    float *from_a = take(&of_a, a), *from_b = take(&of_b, b), *sums = zeros((size_t)m * n);
    // Row-major, C^T = op(B)^T op(A)^T.
    multiply(n, m, k, from_b, tb ? 1 : k, tb ? n : 1, from_a, ta ? 1 : m, ta ? k : 1, sums, m);
    free(from_a), free(from_b);
    give(&of_c, c, sums, &(float){alpha}, &(float){beta});
}
