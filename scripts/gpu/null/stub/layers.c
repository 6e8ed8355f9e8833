// cuDNN's layers by their documentation: sums in FP64, all else in FP32, one rounding.
#include "layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PER_ACTIVATION };                                    // cudnnBatchNormMode_t
enum { SIGMOID, RELU, TANH, CLIPPED_RELU, ELU };            // cudnnActivationMode_t
enum { MAX_POOL, AVERAGE_WITH_PADDING, AVERAGE, MAX_POOL_AGAIN };  // cudnnPoolingMode_t
enum { LOG_SOFTMAX = 2 };                                   // cudnnSoftmaxAlgorithm_t
enum { OF_INSTANCE };                                       // cudnnSoftmaxMode_t: over all but the first axis

typedef struct {
    int n, c, hw;
} Shape;
static Shape shape_of(D x, int of_channels) {
    Shape s = {x->sizes[0], 1, 1};
    for (int i = 1; i < x->dims; i++) *(i == 1 || !of_channels ? &s.c : &s.hw) *= x->sizes[i];
    return s;
}
#define EACH(s, c)                    \
    for (int n = 0; n < (s).n; n++) \
        for (size_t i = ((size_t)n * (s).c + (c)) * (s).hw, end = i + (s).hw; i < end; i++)

// ---- Batch normalization ----------------------------------------------------------------------------------------

static Shape norm_shape(int mode, D x, D parameters) {
    if (parameters->dtype != F32) cannot("batch normalization with these parameters", show(parameters));
    return shape_of(x, mode != PER_ACTIVATION);
}
// A channel's mean, and the sum of the squared distances from it.
static double moments(Shape s, int c, const float *x, double *squares) {
    double sum = 0, mean;
    EACH(s, c) sum += x[i];
    mean = sum / ((double)s.n * s.hw), *squares = 0;
    EACH(s, c) *squares += (x[i] - mean) * (x[i] - mean);
    return mean;
}

void norm_training(int mode, P alpha, P beta, D x, P x_, D y, P y_, D parameters, const float *gamma,
                   const float *bias, double factor, float *mean, float *var, double eps, float *saved_mean,
                   float *saved_inverse) {
    Shape s = norm_shape(mode, x, parameters);
    float *values = take(x, x_);
    for (int c = 0; c < s.c; c++) {
        double squares, found = moments(s, c, values, &squares), count = (double)s.n * s.hw;
        float center = found, inverse = 1 / sqrt(squares / count + eps);
        EACH(s, c) values[i] = gamma[c] * ((values[i] - center) * inverse) + bias[c];
        if (mean) mean[c] = mean[c] * (1 - factor) + found * factor;
        if (var) var[c] = var[c] * (1 - factor) + (count > 1 ? squares / (count - 1) : squares) * factor;
        if (saved_mean) saved_mean[c] = center;
        if (saved_inverse) saved_inverse[c] = inverse;
    }
    give(y, y_, values, alpha, beta);
}

void norm_inference(int mode, P alpha, P beta, D x, P x_, D y, P y_, D parameters, const float *gamma,
                    const float *bias, const float *mean, const float *var, double eps) {
    Shape s = norm_shape(mode, x, parameters);
    float *values = take(x, x_);
    for (int c = 0; c < s.c; c++) {
        float inverse = 1 / sqrt(var[c] + eps);
        EACH(s, c) values[i] = gamma[c] * ((values[i] - mean[c]) * inverse) + bias[c];
    }
    give(y, y_, values, alpha, beta);
}

void norm_backward(int mode, P alpha, P beta, P alpha_p, P beta_p, D x, P x_, D dy, P dy_, D dx, P dx_, D parameters,
                   const float *gamma, float *dgamma, float *dbias, double eps, const float *saved_mean,
                   const float *saved_inverse) {
    Shape s = norm_shape(mode, x, parameters);
    float *values = take(x, x_), *grads = take(dy, dy_), a = *(float *)alpha_p, b = *(float *)beta_p;
    for (int c = 0; c < s.c; c++) {
        double count = (double)s.n * s.hw, sum = 0, product = 0, squares, mean, inverse;
        if (saved_mean && saved_inverse) {
            mean = saved_mean[c], inverse = saved_inverse[c];
        } else {
            mean = moments(s, c, values, &squares);
            inverse = 1 / sqrt(squares / count + eps);
        }
        EACH(s, c) sum += grads[i], product += grads[i] * ((values[i] - mean) * inverse);
        EACH(s, c)
        grads[i] = gamma[c] * inverse * (grads[i] - sum / count - (values[i] - mean) * inverse * product / count);
        dgamma[c] = a * (float)product + (b != 0 ? b * dgamma[c] : 0);
        dbias[c] = a * (float)sum + (b != 0 ? b * dbias[c] : 0);
    }
    free(values);
    give(dx, dx_, grads, alpha, beta);
}

// ---- Activations ------------------------------------------------------------------------------------------------

void activation_forward(D d, P alpha, D x, P x_, P beta, D y, P y_) {
    float *values = take(x, x_), top = d->coefficient;
    for (size_t i = 0, count = count_of(x); i < count; i++) {
        float v = values[i];
        switch (d->mode) {
            case SIGMOID: v = 1 / (1 + expf(-v)); break;
            case RELU: v = v < 0 ? 0 : v; break;
            case TANH: v = tanhf(v); break;
            case CLIPPED_RELU: v = v < 0 ? 0 : v > top ? top : v; break;
            case ELU: v = v < 0 ? top * expm1f(v) : v; break;
            default: cannot("an activation", show(x));
        }
        values[i] = v;
    }
    give(y, y_, values, alpha, beta);
}

void activation_backward(D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_) {
    float *results = take(y, y_), *grads = take(dy, dy_);
    for (size_t i = 0, count = count_of(y); i < count; i++) {
        float v = results[i];
        switch (d->mode) {
            case SIGMOID: grads[i] *= v * (1 - v); break;
            case RELU: grads[i] = v > 0 ? grads[i] : 0; break;
            case TANH: grads[i] *= 1 - v * v; break;
            default: cannot("an activation's gradient", show(y));
        }
    }
    free(results);
    give(dx, dx_, grads, alpha, beta);
}

// ---- Pooling ----------------------------------------------------------------------------------------------------

// Either the results of x, or the gradients of dy, added to dx. Images have a depth of 1.
static void pool(D d, D x, D y, const float *values, float *results, const float *grads, float *sums) {
    if (x->dims != 4 && x->dims != 5) cannot("pooling that is not of images or volumes", show(x));
    int in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, window[3] = {1, 1, 1};
    int is_max = d->mode == MAX_POOL || d->mode == MAX_POOL_AGAIN;
    for (int i = 2; i < x->dims; i++) {
        int to = i + 3 - x->dims;
        in[to] = x->sizes[i], out[to] = y->sizes[i], window[to] = d->window[i - 2];
    }
    size_t image = (size_t)in[0] * in[1] * in[2], count_out = (size_t)out[0] * out[1] * out[2];
    for (size_t at = 0; at < count_out * x->sizes[0] * x->sizes[1]; at++) {
        size_t rest = at % count_out, best = 0;
        int low[3], high[3], inside = 1, all = window[0] * window[1] * window[2], first = 1;
        for (int k = 2; k >= 0; rest /= out[k--]) {
            int own = k + x->dims - 5;
            low[k] = own < 0 ? 0 : (int)(rest % out[k]) * d->steps[own] - d->pads[own], high[k] = low[k] + window[k];
            low[k] = low[k] < 0 ? 0 : low[k], high[k] = high[k] > in[k] ? in[k] : high[k], inside *= high[k] - low[k];
        }
        float most = -INFINITY, sum = 0, count = d->mode == AVERAGE ? inside : all;
        for (int z = low[0]; z < high[0]; z++)
            for (int h = low[1]; h < high[1]; h++)
                for (int w = low[2]; w < high[2]; w++) {
                    size_t i = at / count_out * image + ((size_t)z * in[1] + h) * in[2] + w;
                    if (grads && !is_max) sums[i] += grads[at] / count;
                    sum += values[i];
                    if (first || values[i] > most || values[i] != values[i]) most = values[i], best = i, first = 0;
                }
        if (results) results[at] = is_max ? most : sum / count;
        if (grads && is_max) sums[best] += grads[at];
    }
}
void pooling_forward(D d, P alpha, D x, P x_, P beta, D y, P y_) {
    float *values = take(x, x_), *results = zeros(count_of(y));
    pool(d, x, y, values, results, NULL, NULL);
    free(values);
    give(y, y_, results, alpha, beta);
}
void pooling_backward(D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_) {
    float *values = take(x, x_), *grads = take(dy, dy_), *sums = zeros(count_of(x));
    pool(d, x, y, values, NULL, grads, sums);
    free(values), free(grads);
    give(dx, dx_, sums, alpha, beta);
}

// ---- Softmax ----------------------------------------------------------------------------------------------------

void softmax_forward(int algorithm, int mode, P alpha, D x, P x_, P beta, D y, P y_) {
    Shape s = shape_of(x, mode != OF_INSTANCE);
    float *values = take(x, x_);
    for (int n = 0; n < s.n; n++)
        for (int i = 0; i < s.hw; i++) {
            float *v = values + (size_t)n * s.c * s.hw + i, most = -INFINITY;
            double sum = 0;
            for (long c = 0; c < s.c; c++) most = fmaxf(most, v[c * s.hw]);
            for (long c = 0; c < s.c; c++) sum += expf(v[c * s.hw] - most);
            for (long c = 0; c < s.c; c++) {
                float shifted = v[c * s.hw] - most;
                v[c * s.hw] = algorithm == LOG_SOFTMAX ? shifted - logf(sum) : expf(shifted) / (float)sum;
            }
        }
    give(y, y_, values, alpha, beta);
}
void softmax_backward(int algorithm, int mode, P alpha, D y, P y_, D dy, P dy_, P beta, D dx, P dx_) {
    Shape s = shape_of(y, mode != OF_INSTANCE);
    float *results = take(y, y_), *grads = take(dy, dy_);
    for (int n = 0; n < s.n; n++)
        for (int i = 0; i < s.hw; i++) {
            float *v = results + (size_t)n * s.c * s.hw + i, *g = grads + (size_t)n * s.c * s.hw + i;
            double sum = 0;
            for (long c = 0; c < s.c; c++) sum += g[c * s.hw] * (algorithm == LOG_SOFTMAX ? 1.0 : v[c * s.hw]);
            for (long c = 0; c < s.c; c++) {
                long at = c * s.hw;
                g[at] = algorithm == LOG_SOFTMAX ? g[at] - expf(v[at]) * sum : v[at] * (g[at] - sum);
            }
        }
    free(results);
    give(dx, dx_, grads, alpha, beta);
}

// ---- Biases and dropout -----------------------------------------------------------------------------------------

void bias_backward(P alpha, D dy, P dy_, P beta, D db, P db_) {
    Shape s = shape_of(dy, 1);
    float *grads = take(dy, dy_), *sums = zeros(count_of(db));
    for (int c = 0; c < s.c; c++) {
        double sum = 0;
        EACH(s, c) sum += grads[i];
        sums[c] = sum;
    }
    free(grads);
    give(db, db_, sums, alpha, beta);
}

void add_tensor(P alpha, D a, P a_, P beta, D c, P c_) {
    float *values = take(a, a_), *spread = zeros(count_of(c));
    for (size_t i = 0, count = count_of(c); i < count; i++) {
        size_t rest = i, at = 0, stride = 1;
        for (int k = c->dims - 1; k >= 0; k--) {
            if (a->sizes[k] != 1) at += rest % c->sizes[k] * stride;
            rest /= c->sizes[k], stride *= a->sizes[k];
        }
        spread[i] = values[at];
    }
    free(values);
    give(c, c_, spread, alpha, beta);
}

// Random numbers of its own: xorshift, one for each element.
void dropout_forward(D d, D x, P x_, D y, P y_, unsigned char *reserve) {
    float *values = take(x, x_), keep = 1 - d->coefficient;
    size_t count = count_of(x);
    memset(reserve, 0, count / 8 + 1);
    for (size_t i = 0; i < count; i++) {
        d->seed ^= d->seed << 13, d->seed ^= d->seed >> 7, d->seed ^= d->seed << 17;
        int kept = (d->seed >> 40) * 0x1p-24 < keep;
        reserve[i / 8] |= kept << i % 8;
        values[i] = kept ? values[i] / keep : 0;
    }
    give(y, y_, values, NULL, NULL);
}
void dropout_backward(D d, D dy, P dy_, D dx, P dx_, unsigned char *reserve) {
    float *grads = take(dy, dy_), keep = 1 - d->coefficient;
    for (size_t i = 0, count = count_of(dy); i < count; i++) grads[i] = reserve[i / 8] >> i % 8 & 1 ? grads[i] / keep : 0;
    give(dx, dx_, grads, NULL, NULL);
}
