// The simulated GPU's tensors: any layout and dtype to contiguous floats, and back with one rounding.
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "dnn.h"

size_t count_of(const Descriptor *d) {
    size_t count = 1;
    for (int i = 0; i < d->dims; i++) count *= d->sizes[i];
    return count;
}

static int contiguous(const Descriptor *d) {
    long stride = 1;
    for (int i = d->dims - 1; i >= 0; i--) {
        if (d->sizes[i] > 1 && d->strides[i] != stride) return 0;
        stride *= d->sizes[i];
    }
    return 1;
}

// Where the i-th number, channels first, lies in memory.
static size_t place(const Descriptor *d, size_t i) {
    size_t at = 0;
    for (int k = d->dims - 1; k >= 0; k--) at += i % d->sizes[k] * d->strides[k], i /= d->sizes[k];
    return at;
}

static float one_of(const void *data, int dtype, size_t i) {
    return dtype == F16   ? _cvtsh_ss(((const unsigned short *)data)[i])
           : dtype == F32 ? ((const float *)data)[i]
                          : (float)((const double *)data)[i];
}
static void set_one(void *data, int dtype, size_t i, float value) {
    if (dtype == F16)
        ((unsigned short *)data)[i] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    else if (dtype == F32)
        ((float *)data)[i] = value;
    else
        ((double *)data)[i] = value;
}

float *room(size_t count) { return aligned_alloc(64, (count * sizeof(float) + 127) / 64 * 64); }

float *zeros(size_t count) { return memset(room(count), 0, count * sizeof(float)); }

float *take(const Descriptor *d, const void *data) {
    size_t count = count_of(d), i = 0;
    float *found = room(count);
    if (!contiguous(d)) {
        for (; i < count; i++) found[i] = one_of(data, d->dtype, place(d, i));
    } else if (d->dtype == F32) {
        memcpy(found, data, count * sizeof *found);
    } else if (d->dtype == F16) {
        const unsigned short *from = data;
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(found + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
        for (; i < count; i++) found[i] = _cvtsh_ss(from[i]);
    } else {
        for (; i < count; i++) found[i] = ((const double *)data)[i];
    }
    return found;
}

static float scale(const void *number, const Descriptor *d) {
    return d->dtype == F64 ? (float)*(const double *)number : *(const float *)number;
}

void give(const Descriptor *d, void *data, float *values, const void *alpha, const void *beta) {
    size_t count = count_of(d), i = 0;
    float a = alpha ? scale(alpha, d) : 1, b = beta ? scale(beta, d) : 0;
    int straight = contiguous(d);
    if (a != 1)
        for (size_t k = 0; k < count; k++) values[k] *= a;
    if (b != 0)
        for (size_t k = 0; k < count; k++) values[k] += b * one_of(data, d->dtype, straight ? k : place(d, k));
    if (straight && d->dtype == F16) {
        unsigned short *to = data;
        for (; i + 8 <= count; i += 8)
            _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
    } else if (straight && d->dtype == F32) {
        memcpy(data, values, count * sizeof *values);
        i = count;
    }
    for (; i < count; i++) set_one(data, d->dtype, straight ? i : place(d, i), values[i]);
    free(values);
}
