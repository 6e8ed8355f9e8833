// cuDNN's spatial transformer by its documentation: coordinates from -1 to 1, and a bilinear sample that reads 0
// outside of the image. The grid has (N, H, W, 2) in the transformer's dtype; all is computed in FP32.
#include "layers.h"

#include <math.h>
#include <stdlib.h>

static Descriptor like(D d, int dims, const int *sizes) {
    Descriptor found = {.dtype = d->dtype, .dims = dims};
    for (int i = dims - 1, stride = 1; i >= 0; stride *= sizes[i--])
        found.sizes[i] = sizes[i], found.strides[i] = stride;
    return found;
}
static Descriptor grid_of(D d) { return like(d, 4, (int[]){d->sizes[0], d->sizes[2], d->sizes[3], 2}); }
static Descriptor theta_of(D d) { return like(d, 3, (int[]){d->sizes[0], 2, 3}); }

static float coordinate(int i, int count) { return count > 1 ? -1 + 2.f * i / (count - 1) : -1; }

// Either theta -> grid, or the gradient of the grid -> that of theta.
static void generate(D d, float *theta, float *grid, int backward) {
    int height = d->sizes[2], width = d->sizes[3];
    for (int n = 0; n < d->sizes[0]; n++)
        for (int h = 0; h < height; h++)
            for (int w = 0; w < width; w++) {
                float at[3] = {coordinate(w, width), coordinate(h, height), 1};
                float *point = grid + (((size_t)n * height + h) * width + w) * 2;
                for (int row = 0; row < 2; row++)
                    for (int k = 0; k < 3; k++) {
                        float *entry = theta + (n * 2 + row) * 3 + k;
                        if (backward)
                            *entry += point[row] * at[k];
                        else
                            point[row] += *entry * at[k];
                    }
            }
}
static void computed(D d, P from_, P to_, int backward) {
    Descriptor theta = theta_of(d), grid = grid_of(d);
    const Descriptor *read = backward ? &grid : &theta, *written = backward ? &theta : &grid;
    float *from = take(read, from_), *to = zeros(count_of(written));
    generate(d, backward ? to : from, backward ? from : to, backward);
    give(written, to_, to, NULL, NULL);
    free(from);
}
void grid_forward(D d, P theta_, P grid_) { computed(d, theta_, grid_, 0); }
void grid_backward(D d, P dgrid_, P dtheta_) { computed(d, dgrid_, dtheta_, 1); }

// Results y of x; or, from the gradients dy, those of x and of the grid.
static void sample(D x, D y, const float *values, const float *grid, float *results, const float *dy, float *dx,
                   float *dgrid) {
    int height = x->sizes[2], width = x->sizes[3], channels = x->sizes[1];
    size_t points = (size_t)y->sizes[2] * y->sizes[3], image = (size_t)height * width;
    for (size_t at = 0; at < points * y->sizes[0]; at++) {
        float column = (grid[at * 2] + 1) * (width - 1) / 2, row = (grid[at * 2 + 1] + 1) * (height - 1) / 2;
        int left = (int)floorf(column), top = (int)floorf(row);
        size_t first = at / points * channels;
        for (int corner = 0; corner < 4; corner++) {
            int w = left + corner % 2, h = top + corner / 2;
            if (w < 0 || w >= width || h < 0 || h >= height) continue;
            float across = 1 - fabsf(column - w), down = 1 - fabsf(row - h);
            for (int c = 0; c < channels; c++) {
                size_t from = (first + c) * image + (size_t)h * width + w, to = (first + c) * points + at % points;
                if (results) {
                    results[to] += values[from] * across * down;
                    continue;
                }
                dx[from] += dy[to] * across * down;
                dgrid[at * 2] += dy[to] * values[from] * (corner % 2 ? down : -down) * (width - 1) / 2;
                dgrid[at * 2 + 1] += dy[to] * values[from] * (corner / 2 ? across : -across) * (height - 1) / 2;
            }
        }
    }
}
void sampler_forward(D d, P alpha, D x, P x_, P grid_, P beta, D y, P y_) {
    Descriptor grid = grid_of(d);
    float *values = take(x, x_), *points = take(&grid, grid_), *results = zeros(count_of(y));
    sample(x, y, values, points, results, NULL, NULL, NULL);
    give(y, y_, results, alpha, beta);
    free(values), free(points);
}
void sampler_backward(D d, P alpha, D x, P x_, P beta, D dx, P dx_, P alpha_grid, D dy, P dy_, P grid_, P beta_grid,
                      P dgrid_) {
    Descriptor grid = grid_of(d);
    float *values = take(x, x_), *points = take(&grid, grid_), *grads = take(dy, dy_);
    float *of_x = zeros(count_of(x)), *of_grid = zeros(count_of(&grid));
    sample(x, dy, values, points, NULL, grads, of_x, of_grid);
    give(dx, dx_, of_x, alpha, beta);
    give(&grid, dgrid_, of_grid, alpha_grid, beta_grid);
    free(values), free(points), free(grads);
}
