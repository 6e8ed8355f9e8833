// cuDNN's recurrent layers by their documentation, without dropout, projection, clipping and padding: FP32 sums of
// products, whose factors are rounded to the data's dtype as Tensor Cores take them. Cells and gates are FP32.
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"

enum { RELU, TANH, LSTM, GRU };  // cudnnRNNMode_t
// A reserve space has of each unit and time: the gates, their slopes, a memory (LSTM: the cell; GRU: what the recurrent
// product gives the new gate), and the output.
enum { GATES = 4, KEPT = 2 * GATES + 2, RECURRENT_NEW = 3 };

// Gates in cuDNN's order: LSTM input, forget, new, output; GRU reset, update, new, of which the recurrent product's
// slope is a fourth.
typedef struct {
    int steps, batch, hidden, layers, directions, cell, gates, dtype, inputs;
    size_t rows, times, width;  // gates * hidden; steps * batch; directions * hidden
} Net;

// One direction of a layer.
typedef struct {
    int back, in;                   // whether time runs backward; the inputs
    size_t w, r, w_bias, r_bias;    // where they begin: first all matrices, then all biases
    float *gates, *slopes, *memory; // [times][GATES][hidden] twice, [times][hidden]
    float *out, *below;             // of both directions, [times][width], and what this layer reads
    size_t state;                   // of h and c, [batch][hidden]
} Part;

static Net net_of(const Descriptor *d, const Descriptor *x) {
    if (d->projected || d->clipped || x->padded || x->dtype == F64) cannot("a recurrent layer of this kind", show(x));
    Net v = {x->sizes[0], x->sizes[1], d->hidden, d->layers, d->directions, d->cell};
    v.gates = d->cell == LSTM ? 4 : d->cell == GRU ? 3 : 1;
    v.dtype = x->dtype, v.inputs = x->sizes[2];
    v.rows = (size_t)v.gates * v.hidden, v.times = (size_t)v.steps * v.batch, v.width = (size_t)v.directions * v.hidden;
    return v;
}

size_t recurrent_reserve(D d, int steps, int batch) {
    return (size_t)steps * batch * d->hidden * d->layers * d->directions * KEPT * sizeof(float);
}

static int parts(const Net *v) { return v->layers * v->directions; }

// The matrices of the parts before this one.
static size_t matrices(const Net *v, int part) {
    int first = part < v->directions ? part : v->directions;
    return v->rows * ((size_t)first * v->inputs + (part - first) * v->width + (size_t)part * v->hidden);
}

static Part part_of(const Net *v, int part, float *x, float *reserve) {
    size_t each = v->times * v->hidden;
    int layer = part / v->directions;
    Part p = {part % v->directions, layer ? (int)v->width : v->inputs};
    p.w = matrices(v, part), p.r = p.w + v->rows * p.in;
    p.w_bias = matrices(v, parts(v)) + 2 * v->rows * part, p.r_bias = p.w_bias + v->rows;
    p.gates = reserve + (KEPT - 1) * each * part, p.slopes = p.gates + GATES * each;
    p.memory = p.slopes + GATES * each;
    p.out = reserve + (KEPT - 1) * each * parts(v) + v->times * v->width * layer;
    p.below = layer ? p.out - v->times * v->width : x;
    p.state = (size_t)part * v->batch * v->hidden;
    return p;
}

static float rounded(float value, int dtype) {
    return dtype == F16 ? _cvtsh_ss(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)) : value;
}
static float sigmoid(float value) { return 1 / (1 + expf(-value)); }
static float *take_or_zeros(D d, P data, size_t count) { return data ? take(d, data) : zeros(count); }
static void give_or_free(D d, P data, float *values) { data ? give(d, data, values, NULL, NULL) : free(values); }

// The first row of a part at the so-manieth time that it sees.
static size_t row_of(const Net *v, const Part *p, int step) {
    return (size_t)(p->back ? v->steps - 1 - step : step) * v->batch;
}
// The outputs before that time, and the distance of their rows.
static const float *before(const Net *v, const Part *p, int step, const float *first, size_t *distance) {
    *distance = step ? v->width : (size_t)v->hidden;
    return step ? p->out + row_of(v, p, step - 1) * v->width + p->back * v->hidden : first;
}

// ---- Forward ----------------------------------------------------------------------------------------------------

// A unit's output, from what both products give its gates; h and c become those of this time.
static float unit(const Net *v, const float *of_x, const float *of_h, float *gate, float *memory, float h, float *c) {
    size_t far = v->hidden;
    float g[GATES] = {0}, out;
    for (int k = 0; k < v->gates; k++) g[k] = of_x[k * far] + of_h[k * far];
    if (v->cell == LSTM) {
        for (int k = 0; k < GATES; k++) g[k] = k == 2 ? tanhf(g[k]) : sigmoid(g[k]);
        *memory = *c = g[1] * *c + g[0] * g[2];
        out = g[3] * tanhf(*c);
    } else if (v->cell == GRU) {
        *memory = of_h[2 * far];
        g[0] = sigmoid(g[0]), g[1] = sigmoid(g[1]), g[2] = tanhf(of_x[2 * far] + g[0] * *memory);
        out = (1 - g[1]) * g[2] + g[1] * h;
    } else {
        out = v->cell == TANH ? tanhf(g[0]) : g[0] < 0 ? 0 : g[0];
    }
    for (int k = 0; k < v->gates; k++) gate[k * far] = g[k];
    return rounded(out, v->dtype);
}

// Rows of products with a matrix, and its bias.
static float *product(size_t rows, int in, const float *x, const float *matrix, const float *bias, size_t out) {
    float *found = zeros(rows * out);
    for (size_t i = 0; i < rows; i++) memcpy(found + i * out, bias, out * sizeof *found);
    multiply(rows, out, in, x, in, 1, matrix, 1, in, found, out);
    return found;
}

static void part_forward(const Net *v, const Part *p, const float *w, float *h, float *c) {
    float *of_x = product(v->times, p->in, p->below, w + p->w, w + p->w_bias, v->rows);
    for (int step = 0; step < v->steps; step++) {
        float *of_h = product(v->batch, v->hidden, h, w + p->r, w + p->r_bias, v->rows);
        for (int n = 0; n < v->batch; n++)
            for (int j = 0; j < v->hidden; j++) {
                size_t i = row_of(v, p, step) + n, at = (size_t)n * v->hidden + j;
                h[at] = unit(v, of_x + i * v->rows + j, of_h + n * v->rows + j, p->gates + i * GATES * v->hidden + j,
                             p->memory + i * v->hidden + j, h[at], c + at);
                p->out[i * v->width + p->back * v->hidden + j] = h[at];
            }
        free(of_h);
    }
    free(of_x);
}

void recurrent_forward(D d, D x, P x_, D hx, P hx_, D cx, P cx_, D w, P w_, D y, P y_, D hy, P hy_, D cy, P cy_,
                       P reserve) {
    Net v = net_of(d, x);
    if (reserve && d->coefficient > 0 && d->layers > 1) cannot("dropout between recurrent layers", show(x));
    size_t states = (size_t)parts(&v) * v.batch * v.hidden;
    float *kept = reserve ? reserve : zeros(recurrent_reserve(d, v.steps, v.batch) / sizeof(float));
    float *in = take(x, x_), *weights = take(w, w_), *h = take_or_zeros(hx, hx_, states);
    float *c = take_or_zeros(cx, v.cell == LSTM ? cx_ : NULL, states), *out = zeros(v.times * v.width);
    for (int i = 0; i < parts(&v); i++) {
        Part p = part_of(&v, i, in, kept);
        part_forward(&v, &p, weights, h + p.state, c + p.state);
        memcpy(out, p.out, v.times * v.width * sizeof *out);
    }
    free(in), free(weights);
    if (!reserve) free(kept);
    give(y, y_, out, NULL, NULL);
    give_or_free(hy, hy_, h);
    give_or_free(cy, v.cell == LSTM ? cy_ : NULL, c);
}

// ---- Backward ---------------------------------------------------------------------------------------------------

// The slopes of a unit's gates, from its output's; what goes on to the time before without a product is returned.
static float unit_backward(const Net *v, const float *gate, float memory, float out, float h_before, float c_before,
                           float grad, float *grad_c, float *slope) {
    size_t far = v->hidden;
    float s[GATES] = {0}, through = 0, g[GATES] = {0};
    for (int k = 0; k < v->gates; k++) g[k] = gate[k * far];
    if (v->cell == LSTM) {
        float top = tanhf(memory), of_c = *grad_c + grad * g[3] * (1 - top * top);
        s[0] = of_c * g[2] * g[0] * (1 - g[0]), s[1] = of_c * c_before * g[1] * (1 - g[1]);
        s[2] = of_c * g[0] * (1 - g[2] * g[2]), s[3] = grad * top * g[3] * (1 - g[3]);
        *grad_c = of_c * g[1];
    } else if (v->cell == GRU) {
        s[2] = grad * (1 - g[1]) * (1 - g[2] * g[2]);
        s[1] = grad * (h_before - g[2]) * g[1] * (1 - g[1]);
        s[0] = s[2] * memory * g[0] * (1 - g[0]);
        s[RECURRENT_NEW] = s[2] * g[0], through = grad * g[1];
    } else {
        s[0] = v->cell == TANH ? grad * (1 - out * out) : out > 0 ? grad : 0;
    }
    for (int k = 0; k < GATES; k++) slope[k * far] = rounded(s[k], v->dtype);
    return through;
}

// The number of a gate's slope in the recurrent product.
static int of_product(const Net *v, int gate) { return v->cell == GRU && gate == 2 ? RECURRENT_NEW : gate; }

static void part_backward(const Net *v, const Part *p, const float *w, const float *hx, const float *cx,
                          const float *dy, float *dh, float *dc, float *dx) {
    size_t far = v->hidden, slopes = GATES * far;
    for (int step = v->steps - 1; step >= 0; step--) {
        size_t distance, row = row_of(v, p, step), row_before = step ? row_of(v, p, step - 1) : 0;
        const float *h_before = before(v, p, step, hx, &distance);
        for (int n = 0; n < v->batch; n++)
            for (int j = 0; j < v->hidden; j++) {
                size_t i = row + n, at = n * far + j, place = i * v->width + p->back * far + j;
                float c_before = step ? p->memory[(row_before + n) * far + j] : cx[at];
                dh[at] = unit_backward(v, p->gates + i * slopes + j, p->memory[i * far + j], p->out[place],
                                       h_before[n * distance + j], c_before, dh[at] + dy[place], dc + at,
                                       p->slopes + i * slopes + j);
            }
        for (int k = 0; k < v->gates; k++)
            multiply(v->batch, far, far, p->slopes + row * slopes + of_product(v, k) * far, slopes, 1,
                     w + p->r + k * far * far, far, 1, dh, far);
    }
    for (int k = 0; k < v->gates; k++)
        multiply(v->times, p->in, far, p->slopes + k * far, slopes, 1, w + p->w + k * far * p->in, p->in, 1, dx, p->in);
}

void recurrent_backward(D d, D y, D dy, P dy_, D dhy, P dhy_, D dcy, P dcy_, D w, P w_, D hx, P hx_, D cx, P cx_, D dx,
                        P dx_, D dhx, P dhx_, D dcx, P dcx_, P reserve) {
    Net v = net_of(d, dx);
    int lstm = v.cell == LSTM;
    size_t states = (size_t)parts(&v) * v.batch * v.hidden;
    float *weights = take(w, w_), *h = take_or_zeros(hx, hx_, states), *dh = take_or_zeros(dhy, dhy_, states);
    float *c = take_or_zeros(cx, lstm ? cx_ : NULL, states), *dc = take_or_zeros(dcy, lstm ? dcy_ : NULL, states);
    float *grads = take(dy, dy_), *below = NULL;
    for (int i = parts(&v) - 1; i >= 0; i--) {
        Part p = part_of(&v, i, NULL, reserve);
        if (!below) below = zeros(v.times * p.in);
        part_backward(&v, &p, weights, h + p.state, c + p.state, grads, dh + p.state, dc + p.state, below);
        if (i % v.directions == 0) free(grads), grads = below, below = NULL;
    }
    free(weights), free(h), free(c);
    give(dx, dx_, grads, NULL, NULL);
    give_or_free(dhx, dhx_, dh);
    give_or_free(dcx, lstm ? dcx_ : NULL, dc);
}

// Adds to the gradients of the parameters, as cuDNN does.
void recurrent_backward_weights(D d, D x, P x_, D hx, P hx_, D dw, P dw_, P reserve) {
    Net v = net_of(d, x);
    size_t far = v.hidden, slopes = GATES * far;
    float *in = take(x, x_), *sums = zeros(count_of(dw));
    float *h = take_or_zeros(hx, hx_, (size_t)parts(&v) * v.batch * v.hidden);
    for (int i = 0; i < parts(&v); i++) {
        Part p = part_of(&v, i, in, reserve);
        for (int k = 0; k < v.gates; k++) {
            float *of_x = p.slopes + k * far, *of_h = p.slopes + of_product(&v, k) * far;
            multiply(far, p.in, v.times, of_x, 1, slopes, p.below, p.in, 1, sums + p.w + k * far * p.in, p.in);
            for (int step = 0; step < v.steps; step++) {
                size_t distance;
                const float *h_before = before(&v, &p, step, h + p.state, &distance);
                multiply(far, far, v.batch, of_h + row_of(&v, &p, step) * slopes, 1, slopes, h_before, distance, 1,
                         sums + p.r + k * far * far, far);
            }
            for (size_t j = 0; j < far; j++) {
                double of_w = 0, of_r = 0;
                for (size_t t = 0; t < v.times; t++) of_w += of_x[t * slopes + j], of_r += of_h[t * slopes + j];
                sums[p.w_bias + k * far + j] = of_w, sums[p.r_bias + k * far + j] = of_r;
            }
        }
    }
    free(in), free(h);
    give(dw, dw_, sums, NULL, &(float){1});
}
