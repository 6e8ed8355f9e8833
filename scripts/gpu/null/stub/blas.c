// cuBLAS: every matrix product with its data types, the type that it sums in, and its sizes.
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "dnn.h"

// What a handle points to.
typedef struct {
    int math;
} Blas;

API Status cublasCreate_v2(Handle *handle) { return *handle = new_handle(), 0; }
API Status cublasDestroy_v2(Handle handle) { return free(handle), 0; }
API Status cublasGetMathMode(const Blas *handle, int *mode) { return *mode = handle->math, 0; }
API Status cublasSetMathMode(Blas *handle, int mode) { return handle->math = mode, 0; }

enum { R_32F, R_64F, R_16F };  // cudaDataType: the same numbers as cuDNN's

static const char *data_type(int type) {
    static const char *NAMES[] = {"f32", "f64", "f16"};
    return type >= 0 && type < 3 ? NAMES[type] : "other";
}

// cublasComputeType_t, or the cudaDataType that stood in its place before CUDA 11.
static const char *compute_type(int type) {
    switch (type) {
        case 64:
        case 65: return "f16";
        case 68:
        case 69: return "f32";
        case 70:
        case 71: return "f64";
        case 74: return "f32_fast_f16";
        default: return data_type(type);
    }
}

// cublasMath_t, cublasGemmAlgo_t: the first and the last ask for Tensor Cores, the second for those of TF32.
enum { TENSOR_OP_MATH = 1, TF32_MATH = 3, TENSOR_OP_ALGORITHM = 99 };

// One of the matrices of a product: its data, type, distance between columns, and elements between two of a batch.
typedef struct {
    const void *data;
    int dtype, distance;
    long long apart;
} Matrix;

static double scalar(const void *number, const char *compute) {
    return !strcmp(compute, "f64")   ? *(const double *)number
           : !strcmp(compute, "f16") ? _cvtsh_ss(*(const unsigned short *)number)
                                     : *(const float *)number;
}
static void *of_batch(Matrix x, int i) {
    static const int WIDTHS[] = {4, 8, 2};
    return (char *)x.data + i * x.apart * WIDTHS[x.dtype];
}

static Status product(const char *name, const Blas *handle, int ta, int tb, int m, int n, int k, const void *alpha,
                      Matrix a, Matrix b, const void *beta, Matrix c, int batch, const char *compute, int algorithm) {
    int tensor_op = handle->math == TENSOR_OP_MATH || algorithm == TENSOR_OP_ALGORITHM;
    const char *math = tensor_op ? "TENSOR_OP" : handle->math == TF32_MATH ? "TF32" : "DEFAULT";
    record("call", name, "x=%s w=%s y=%s compute=%s math=%s m=%d n=%d k=%d batch=%d", data_type(a.dtype),
           data_type(b.dtype), data_type(c.dtype), compute, math, m, n, k, batch);
    if (!computing) return 0;
    if (!strcmp(compute, "f16")) cannot("a product with float16 sums", name);
    for (int i = 0; i < batch; i++)
        compute_product(ta, tb, m, n, k, scalar(alpha, compute), of_batch(a, i), a.dtype, a.distance, of_batch(b, i),
                        b.dtype, b.distance, scalar(beta, compute), of_batch(c, i), c.dtype, c.distance);
    return 0;
}

#define SIZES const Blas *handle, int ta, int tb, int m, int n, int k, const void *alpha
#define PRODUCT(name, a, b, c, batch, compute, algorithm)                                                           \
    product(name, handle, ta, tb, m, n, k, alpha, (Matrix){UNPACKED a}, (Matrix){UNPACKED b}, beta,                 \
            (Matrix){UNPACKED c}, batch, compute, algorithm)
#define UNPACKED(...) __VA_ARGS__
API Status cublasGemmEx(SIZES, const void *A, int a, int lda, const void *B, int b, int ldb, const void *beta, void *C,
                        int c, int ldc, int compute, int algorithm) {
    return PRODUCT("cublasGemmEx", (A, a, lda), (B, b, ldb), (C, c, ldc), 1, compute_type(compute), algorithm);
}
API Status cublasGemmStridedBatchedEx(SIZES, const void *A, int a, int lda, long long sa, const void *B, int b, int ldb,
                                      long long sb, const void *beta, void *C, int c, int ldc, long long sc, int batch,
                                      int compute, int algorithm) {
    return PRODUCT("cublasGemmStridedBatchedEx", (A, a, lda, sa), (B, b, ldb, sb), (C, c, ldc, sc), batch,
                   compute_type(compute), algorithm);
}
API Status cublasSgemmEx(SIZES, const void *A, int a, int lda, const void *B, int b, int ldb, const void *beta, void *C,
                         int c, int ldc) {
    return PRODUCT("cublasSgemmEx", (A, a, lda), (B, b, ldb), (C, c, ldc), 1, "f32", 0);
}

#define GEMM(name, type)                                                                                         \
    API Status name(SIZES, const void *A, int lda, const void *B, int ldb, const void *beta, void *C, int ldc) { \
        return PRODUCT(#name, (A, type, lda), (B, type, ldb), (C, type, ldc), 1, data_type(type), 0);            \
    }
#define GEMM_BATCHED(name, type)                                                                                \
    API Status name(SIZES, const void *A, int lda, long long sa, const void *B, int ldb, long long sb,          \
                    const void *beta, void *C, int ldc, long long sc, int batch) {                              \
        return PRODUCT(#name, (A, type, lda, sa), (B, type, ldb, sb), (C, type, ldc, sc), batch, data_type(type), 0); \
    }
GEMM(cublasSgemm_v2, R_32F)
GEMM(cublasDgemm_v2, R_64F)
GEMM_BATCHED(cublasHgemmStridedBatched, R_16F)
GEMM_BATCHED(cublasSgemmStridedBatched, R_32F)
GEMM_BATCHED(cublasDgemmStridedBatched, R_64F)
API Status cublasSdot_v2(Handle handle, int n, const float *x, int x_step, const float *y, int y_step, float *result) {
    record("call", "cublasSdot_v2", "%s", "");
    double sum = 0;
    for (long i = 0; computing && i < n; i++) sum += (double)x[i * x_step] * y[i * y_step];
    if (computing) *result = sum;
    return 0;
}

// cuSOLVER, as far as it says how much memory it wants: the number that the last argument points to.
#define WANTS(name, ...) \
    API Status name(__VA_ARGS__, int *size) { return *size = 1024, 0; }
#define WANTS_OF_BOTH(name, ...) WANTS(cusolverDnS##name, __VA_ARGS__) WANTS(cusolverDnD##name, __VA_ARGS__)
WANTS_OF_BOTH(geqrf_bufferSize, Handle h, int m, int n, void *A, int lda)
WANTS_OF_BOTH(gesvd_bufferSize, Handle h, int m, int n)
WANTS_OF_BOTH(getrf_bufferSize, Handle h, int m, int n, void *A, int lda)
WANTS_OF_BOTH(orgqr_bufferSize, Handle h, int m, int n, int k, void *A, int lda, void *tau)
WANTS_OF_BOTH(potrf_bufferSize, Handle h, int uplo, int n, void *A, int lda)
WANTS_OF_BOTH(syevd_bufferSize, Handle h, int jobz, int uplo, int n, void *A, int lda, void *W)
