// cuDNN's descriptors, and what the simulated GPU computes of its calls.
#pragma once
#include "record.h"

enum { F32, F64, F16 };  // cudnnDataType_t
enum { MAX_DIMS = 8 };

// Of a tensor, a filter, a convolution or a recurrent network: each uses the fields that it has.
typedef struct {
    int dtype, dims, sizes[MAX_DIMS], strides[MAX_DIMS], channels_last;
    int compute, math, groups;
    int hidden, layers, directions, cell, projected, clipped, padded;
    int pads[MAX_DIMS], steps[MAX_DIMS], dilations[MAX_DIMS], window[MAX_DIMS], mode;
    double coefficient;
    unsigned long seed;
} Descriptor;

typedef Descriptor *D;
typedef void *P;  // data, a scalar, or a descriptor that nobody reads

// "f16[2,3,4,4]", valid until the eighth next call.
const char *show(const Descriptor *d);

// ---- numbers.c: tensors as contiguous floats, channels first ----------------------------------------------------

size_t count_of(const Descriptor *d);
float *take(const Descriptor *d, const void *data);
// Data is alpha * values + beta * data, rounded once; frees the values.
void give(const Descriptor *d, void *data, float *values, const void *alpha, const void *beta);
float *room(size_t count);  // not set
float *zeros(size_t count);

// Row-major c[m][n] += a[m][k] b[k][n] in FP32, with any distance between a's and b's rows and columns.
void multiply(int m, int n, int k, const float *a, long a_row, long a_column, const float *b, long b_row,
              long b_column, float *c, long c_row);

enum { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };
void compute_convolution(int kind, D x, P x_, D w, P w_, D y, P y_, D convolution, P alpha, P beta);
// cuBLAS's products, column by column.
void compute_product(int ta, int tb, int m, int n, int k, double alpha, const void *a, int a_dtype, int lda,
                     const void *b, int b_dtype, int ldb, double beta, void *c, int c_dtype, int ldc);
