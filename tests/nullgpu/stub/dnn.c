// cuDNN: descriptors that remember what they were set to, and the calls that read them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "record.h"

enum { F32, F64, F16 };                                  // cudnnDataType_t
enum { DEFAULT_MATH, TENSOR_OP, TENSOR_OP_CONVERSION };  // cudnnMathType_t
enum { NHWC = 1 };                                       // cudnnTensorFormat_t
enum { LSTM = 2, GRU = 3 };                              // cudnnRNNMode_t
enum { MAX_DIMS = 8, WORKSPACE = 1 << 20 };

// Of a tensor, a filter, a convolution or a recurrent network: each uses the fields that it has.
typedef struct {
    int dtype, dims, sizes[MAX_DIMS], channels_last;
    int compute, math, groups;
    int hidden, layers, directions, cell, projected;
} Descriptor;

typedef Descriptor *D;
typedef void *P;  // data, a scalar, or a descriptor that nobody reads

static const char *dtype_name(int dtype) {
    static const char *NAMES[] = {"f32", "f64", "f16"};
    return dtype >= 0 && dtype < 3 ? NAMES[dtype] : "other";
}
static const char *math_name(int math) {
    static const char *NAMES[] = {"DEFAULT", "TENSOR_OP", "TENSOR_OP_ALLOW_CONVERSION", "FMA"};
    return math >= 0 && math < 4 ? NAMES[math] : "other";
}

// "f16[2,3,4,4]", valid until the eighth next call.
static const char *show(const Descriptor *d) {
    static __thread char ring[8][128];
    static __thread unsigned at;
    char *text = ring[at++ % 8], *end = text + sprintf(text, "%s[", dtype_name(d->dtype));
    for (int i = 0; i < d->dims; i++) end += sprintf(end, "%s%d", i ? "," : "", d->sizes[i]);
    sprintf(end, "]%s", d->channels_last ? "NHWC" : "");
    return text;
}

// ---- Descriptors -------------------------------------------------------------------------------------------------

static Status make(D *made) {
    *made = calloc(1, sizeof **made);
    (*made)->groups = 1;
    return 0;
}
#define DESCRIPTOR(name)                                                     \
    API Status cudnnCreate##name##Descriptor(D *made) { return make(made); } \
    API Status cudnnDestroy##name##Descriptor(D made) { return free(made), 0; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNNData)
DESCRIPTOR(RNN)
DESCRIPTOR(SpatialTransformer)

API size_t cudnnGetVersion(void) { return 8101; }
API Status cudnnCreate(Handle *handle) { return *handle = new_handle(), 0; }
API Status cudnnDestroy(Handle handle) { return free(handle), 0; }

static Status set(D d, int dtype, int dims, const int *sizes, int channels_last) {
    d->dtype = dtype;
    d->dims = dims < MAX_DIMS ? dims : MAX_DIMS;
    memcpy(d->sizes, sizes, d->dims * sizeof *sizes);
    d->channels_last = channels_last;
    return 0;
}
API Status cudnnSetTensor4dDescriptor(D d, int format, int dtype, int n, int c, int h, int w) {
    return set(d, dtype, 4, (int[]){n, c, h, w}, format == NHWC);
}
API Status cudnnSetTensorNdDescriptor(D d, int dtype, int dims, const int *sizes, const int *strides) {
    return set(d, dtype, dims, sizes, dims == 4 && strides[1] == 1 && strides[3] != 1);
}
API Status cudnnSetFilter4dDescriptor(D d, int dtype, int format, int k, int c, int h, int w) {
    return set(d, dtype, 4, (int[]){k, c, h, w}, format == NHWC);
}
API Status cudnnSetFilterNdDescriptor(D d, int dtype, int format, int dims, const int *sizes) {
    return set(d, dtype, dims, sizes, format == NHWC);
}
API Status cudnnDeriveBNTensorDescriptor(D d, D x, int mode) {
    *d = *x;
    if (d->dtype == F16) d->dtype = F32;  // as cuDNN documents it
    for (int i = 0; i < d->dims; i++) d->sizes[i] = i == 1 ? x->sizes[1] : 1;
    return 0;
}
API Status cudnnSetRNNDataDescriptor(D d, int dtype, int layout, int steps, int batch, int width) {
    return set(d, dtype, 3, (int[]){steps, batch, width}, 0);
}
API Status cudnnSetConvolution2dDescriptor(D d, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int compute) {
    return d->compute = compute, 0;
}
API Status cudnnSetConvolutionNdDescriptor(D d, int dims, P pads, P strides, P dilations, int mode, int compute) {
    return d->compute = compute, 0;
}
API Status cudnnSetConvolutionGroupCount(D d, int groups) { return d->groups = groups, 0; }
API Status cudnnSetConvolutionMathType(D d, int math) { return d->math = math, 0; }

// ---- Convolutions ------------------------------------------------------------------------------------------------

// cudnnConvolutionFwdAlgoPerf_t, which is also what is found for the gradients.
typedef struct {
    int algorithm, status;
    float time;
    size_t memory;
    int deterministic, math, reserved[3];
} Found;

// Every operation has an algorithm 1 for Tensor Cores, offered first where math type and data allow it, and a 0.
static Status find(const char *name, D x, D w, D y, D convolution, int *count, Found *found) {
    record("call", name, "x=%s w=%s y=%s compute=%s math=%s", show(x), show(w), show(y),
           dtype_name(convolution->compute), math_name(convolution->math));
    int low = x->dtype == F16 || convolution->math == TENSOR_OP_CONVERSION;
    *count = 0;
    if (low && convolution->math != DEFAULT_MATH) {
        found[(*count)++] = (Found){.algorithm = 1, .time = 1, .memory = WORKSPACE, .math = convolution->math};
    }
    found[(*count)++] = (Found){.algorithm = 0, .time = 2, .math = DEFAULT_MATH};
    return 0;
}

static Status convolve(const char *name, D x, D w, D y, D convolution) {
    record("call", name, "x=%s w=%s y=%s compute=%s math=%s groups=%d", show(x), show(w), show(y),
           dtype_name(convolution->compute), math_name(convolution->math), convolution->groups);
    return 0;
}

// Of the forward pass, and of both gradients: descriptors in the order of the arguments, data of each but the
// convolution.
#define CONVOLUTION(Run, Kind, a, b, c, x, w, y)                                                                     \
    API Status cudnnFindConvolution##Kind##Algorithm(Handle h, D a, D b, D convolution, D c, int room, int *count,   \
                                                     Found *found) {                                                 \
        return find("cudnnFindConvolution" #Kind "Algorithm", x, w, y, convolution, count, found);                   \
    }                                                                                                                \
    API Status cudnnGetConvolution##Kind##Algorithm_v7(Handle h, D a, D b, D convolution, D c, int room, int *count, \
                                                       Found *found) {                                               \
        return find("cudnnGetConvolution" #Kind "Algorithm_v7", x, w, y, convolution, count, found);                 \
    }                                                                                                                \
    API Status cudnnGetConvolution##Kind##AlgorithmMaxCount(Handle h, int *count) { return *count = 8, 0; }          \
    API Status cudnnGetConvolution##Kind##WorkspaceSize(Handle h, D a, D b, D convolution, D c, int algorithm,       \
                                                        size_t *size) {                                              \
        return *size = WORKSPACE, 0;                                                                                 \
    }                                                                                                                \
    API Status Run(Handle h, P alpha, D a, P a_, D b, P b_, D convolution, int algorithm, P workspace, size_t size,  \
                   P beta, D c) {                                                                                    \
        return convolve(#Run, x, w, y, convolution);                                                                 \
    }
CONVOLUTION(cudnnConvolutionForward, Forward, x, w, y, x, w, y)
CONVOLUTION(cudnnConvolutionBackwardData, BackwardData, w, dy, dx, dy, w, dx)
CONVOLUTION(cudnnConvolutionBackwardFilter, BackwardFilter, x, dy, dw, x, dy, dw)

// ---- Recurrent networks ------------------------------------------------------------------------------------------

API Status cudnnSetRNNDescriptor_v6(Handle h, D d, int hidden, int layers, D dropout, int input, int both, int cell,
                                    int algorithm, int compute) {
    d->hidden = hidden;
    d->layers = layers;
    d->directions = 1 + both;
    d->cell = cell;
    d->compute = compute;
    return 0;
}
API Status cudnnSetRNNMatrixMathType(D d, int math) { return d->math = math, 0; }
API Status cudnnSetRNNProjectionLayers(Handle h, D d, int size) { return d->projected = size, 0; }
API Status cudnnGetRNNParamsSize(Handle h, D d, D x, size_t *bytes, int dtype) {
    size_t gates = d->cell == LSTM ? 4 : d->cell == GRU ? 3 : 1, hidden = d->hidden, weights = 0;
    size_t out = d->projected ? (size_t)d->projected : hidden, in = x->sizes[1];
    for (int layer = 0; layer < d->layers; layer++, in = out * d->directions) {
        weights += d->directions * (gates * hidden * (in + out + 2) + (out != hidden ? out * hidden : 0));
    }
    return *bytes = weights * (dtype == F16 ? 2 : dtype == F64 ? 8 : 4), 0;
}
API Status cudnnGetRNNWorkspaceSize(Handle h, D d, int steps, P x, size_t *size) { return *size = WORKSPACE, 0; }
API Status cudnnGetRNNTrainingReserveSize(Handle h, D d, int steps, P x, size_t *size) { return *size = WORKSPACE, 0; }

#define RECURRENT(name)                                                                             \
    API Status name(Handle h, D d, D x) {                                                           \
        record("call", #name, "x=%s compute=%s math=%s hidden=%d layers=%d directions=%d", show(x), \
               dtype_name(d->compute), math_name(d->math), d->hidden, d->layers, d->directions);    \
        return 0;                                                                                   \
    }
RECURRENT(cudnnRNNForwardTrainingEx)
RECURRENT(cudnnRNNForwardInferenceEx)
RECURRENT(cudnnRNNBackwardDataEx)
RECURRENT(cudnnRNNBackwardWeightsEx)

// ---- All else that reads a tensor --------------------------------------------------------------------------------

#define NORM(name, ...)                                                                       \
    API Status name(Handle h, int mode, P alpha, P beta, __VA_ARGS__) {                       \
        record("call", #name, "x=%s y=%s parameters=%s", show(x), show(y), show(parameters)); \
        return 0;                                                                             \
    }
NORM(cudnnBatchNormalizationForwardTraining, D x, P x_, D y, P y_, D parameters)
NORM(cudnnBatchNormalizationForwardInference, D x, P x_, D y, P y_, D parameters)
NORM(cudnnBatchNormalizationBackward, P alpha_, P beta_, D x, P x_, D dy, P dy_, D y, P y_, D parameters)

#define READER(name, ...)                       \
    API Status name(Handle h, __VA_ARGS__) {    \
        record("call", #name, "x=%s", show(x)); \
        return 0;                               \
    }
READER(cudnnActivationForward, P activation, P alpha, D x)
READER(cudnnActivationBackward, P activation, P alpha, D x)
READER(cudnnPoolingForward, P pooling, P alpha, D x)
READER(cudnnPoolingBackward, P pooling, P alpha, D x)
READER(cudnnSoftmaxForward, int algorithm, int mode, P alpha, D x)
READER(cudnnSoftmaxBackward, int algorithm, int mode, P alpha, D x)
READER(cudnnConvolutionBackwardBias, P alpha, D x)
READER(cudnnAddTensor, P alpha, D x)
READER(cudnnDropoutForward, P dropout, D x)
READER(cudnnDropoutBackward, P dropout, D x)
READER(cudnnSpatialTfSamplerForward, P transformer, P alpha, D x)
READER(cudnnSpatialTfSamplerBackward, P transformer, P alpha, D x)

API Status cudnnDropoutGetStatesSize(Handle h, size_t *size) { return *size = 1 << 16, 0; }
API Status cudnnDropoutGetReserveSpaceSize(D x, size_t *size) {
    *size = 1;
    for (int i = 0; i < x->dims; i++) *size *= x->sizes[i];
    return *size = *size / 8 + 16, 0;
}
