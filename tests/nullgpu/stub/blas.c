// cuBLAS: every matrix product with its data types, the type that it sums in, and its sizes.
#include <stdlib.h>

#include "record.h"

// What a handle points to.
typedef struct {
    int math;
} Blas;

API Status cublasCreate_v2(Handle *handle) { return *handle = new_handle(), 0; }
API Status cublasDestroy_v2(Handle handle) { return free(handle), 0; }
API Status cublasGetMathMode(const Blas *handle, int *mode) { return *mode = handle->math, 0; }
API Status cublasSetMathMode(Blas *handle, int mode) { return handle->math = mode, 0; }

enum { R_32F, R_64F, R_16F };  // cudaDataType

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

enum { TENSOR_OP_MATH = 1, TENSOR_OP_ALGORITHM = 99 };  // cublasMath_t, cublasGemmAlgo_t: either asks for Tensor Cores

static Status product(const char *name, const Blas *handle, int a, int b, int c, const char *compute, int algorithm,
                      int m, int n, int k, int batch) {
    int tensor_op = handle->math == TENSOR_OP_MATH || algorithm == TENSOR_OP_ALGORITHM;
    record("call", name, "x=%s w=%s y=%s compute=%s math=%s m=%d n=%d k=%d batch=%d", data_type(a), data_type(b),
           data_type(c), compute, tensor_op ? "TENSOR_OP" : "DEFAULT", m, n, k, batch);
    return 0;
}

#define SIZES const Blas *handle, int ta, int tb, int m, int n, int k, const void *alpha
API Status cublasGemmEx(SIZES, const void *A, int a, int lda, const void *B, int b, int ldb, const void *beta, void *C,
                        int c, int ldc, int compute, int algorithm) {
    return product("cublasGemmEx", handle, a, b, c, compute_type(compute), algorithm, m, n, k, 1);
}
API Status cublasGemmStridedBatchedEx(SIZES, const void *A, int a, int lda, long long sa, const void *B, int b, int ldb,
                                      long long sb, const void *beta, void *C, int c, int ldc, long long sc, int batch,
                                      int compute, int algorithm) {
    return product("cublasGemmStridedBatchedEx", handle, a, b, c, compute_type(compute), algorithm, m, n, k, batch);
}
API Status cublasSgemmEx(SIZES, const void *A, int a, int lda, const void *B, int b, int ldb, const void *beta, void *C,
                         int c) {
    return product("cublasSgemmEx", handle, a, b, c, "f32", 0, m, n, k, 1);
}

#define GEMM(name, type)                                                                 \
    API Status name(const Blas *handle, int ta, int tb, int m, int n, int k) {           \
        return product(#name, handle, type, type, type, data_type(type), 0, m, n, k, 1); \
    }
#define GEMM_BATCHED(name, type)                                                                       \
    API Status name(SIZES, const void *A, int lda, long long sa, const void *B, int ldb, long long sb, \
                    const void *beta, void *C, int ldc, long long sc, int batch) {                     \
        return product(#name, handle, type, type, type, data_type(type), 0, m, n, k, batch);           \
    }
GEMM(cublasSgemm_v2, R_32F)
GEMM(cublasDgemm_v2, R_64F)
GEMM_BATCHED(cublasHgemmStridedBatched, R_16F)
GEMM_BATCHED(cublasSgemmStridedBatched, R_32F)
GEMM_BATCHED(cublasDgemmStridedBatched, R_64F)

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
