// cuDNN: descriptors that remember what they were set to, and the calls that read them.
#include "dnn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"

enum { DEFAULT_MATH, TENSOR_OP, TENSOR_OP_CONVERSION };  // cudnnMathType_t
enum { NHWC = 1 };                                       // cudnnTensorFormat_t
enum { LSTM = 2, GRU = 3 };                              // cudnnRNNMode_t
enum { BATCH_MAJOR = 2 };                                // cudnnRNNDataLayout_t
enum { WORKSPACE = 1 << 20 };

static const char *dtype_name(int dtype) {
    static const char *NAMES[] = {"f32", "f64", "f16"};
    return dtype >= 0 && dtype < 3 ? NAMES[dtype] : "other";
}
static const char *math_name(int math) {
    static const char *NAMES[] = {"DEFAULT", "TENSOR_OP", "TENSOR_OP_ALLOW_CONVERSION", "FMA"};
    return math >= 0 && math < 4 ? NAMES[math] : "other";
}

const char *show(const Descriptor *d) {
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
    int stride = 1;
    if (channels_last) d->strides[1] = 1, stride = sizes[1];
    for (int i = d->dims - 1; i >= 0; i--)
        if (!channels_last || i != 1) d->strides[i] = stride, stride *= sizes[i];
    return 0;
}
API Status cudnnSetTensor4dDescriptor(D d, int format, int dtype, int n, int c, int h, int w) {
    return set(d, dtype, 4, (int[]){n, c, h, w}, format == NHWC);
}
API Status cudnnSetTensorNdDescriptor(D d, int dtype, int dims, const int *sizes, const int *strides) {
    set(d, dtype, dims, sizes, dims == 4 && strides[1] == 1 && strides[3] != 1);
    memcpy(d->strides, strides, d->dims * sizeof *strides);
    return 0;
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
API Status cudnnSetRNNDataDescriptor(D d, int dtype, int layout, int steps, int batch, int width, const int *lengths) {
    d->padded = layout == BATCH_MAJOR;
    for (int i = 0; i < batch; i++) d->padded |= lengths[i] != steps;
    return set(d, dtype, 3, (int[]){steps, batch, width}, 0);
}
API Status cudnnSetConvolutionNdDescriptor(D d, int dims, const int *pads, const int *steps, const int *dilations,
                                           int mode, int compute) {
    d->dims = dims;
    memcpy(d->pads, pads, dims * sizeof *pads);
    memcpy(d->steps, steps, dims * sizeof *steps);
    memcpy(d->dilations, dilations, dims * sizeof *dilations);
    return d->mode = mode, d->compute = compute, 0;
}
API Status cudnnSetConvolution2dDescriptor(D d, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int compute) {
    return cudnnSetConvolutionNdDescriptor(d, 2, (int[]){ph, pw}, (int[]){sh, sw}, (int[]){dh, dw}, mode, compute);
}
API Status cudnnSetPoolingNdDescriptor(D d, int mode, int nan, int dims, const int *window, const int *pads,
                                       const int *steps) {
    d->dims = dims;
    memcpy(d->window, window, dims * sizeof *window);
    memcpy(d->pads, pads, dims * sizeof *pads);
    memcpy(d->steps, steps, dims * sizeof *steps);
    return d->mode = mode, 0;
}
API Status cudnnSetPooling2dDescriptor(D d, int mode, int nan, int h, int w, int ph, int pw, int sh, int sw) {
    return cudnnSetPoolingNdDescriptor(d, mode, nan, 2, (int[]){h, w}, (int[]){ph, pw}, (int[]){sh, sw});
}
API Status cudnnSetActivationDescriptor(D d, int mode, int nan, double coefficient) {
    return d->mode = mode, d->coefficient = coefficient, 0;
}
API Status cudnnSetDropoutDescriptor(D d, Handle h, float p, P states, size_t size, unsigned long long seed) {
    return d->coefficient = p, d->seed = seed * 2654435761ul + 88172645463325252ul, 0;
}
API Status cudnnRestoreDropoutDescriptor(D d, Handle h, float p, P states, size_t size, unsigned long long seed) {
    return d->seed ? d->coefficient = p, 0 : cudnnSetDropoutDescriptor(d, h, p, states, size, seed);
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

static Status convolve(const char *name, int kind, D x, P x_, D w, P w_, D y, P y_, D convolution, P alpha, P beta) {
    record("call", name, "x=%s w=%s y=%s compute=%s math=%s groups=%d", kind == BACKWARD_DATA ? show(y) : show(x),
           kind == BACKWARD_FILTER ? show(y) : show(w),
           kind == FORWARD ? show(y) : kind == BACKWARD_DATA ? show(x) : show(w), dtype_name(convolution->compute),
           math_name(convolution->math), convolution->groups);
    if (computing) compute_convolution(kind, x, x_, w, w_, y, y_, convolution, alpha, beta);
    return 0;
}

// Of the forward pass, and of both gradients: descriptors in the order of the arguments, data of each but the
// convolution; which of them the search for an algorithm calls x, w and y; and which they are of the forward pass.
#define CONVOLUTION(Run, Kind, kind, a, b, c, x, w, y, of_forward)                                                   \
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
    API Status Run(Handle h, P alpha, D a, P a##_, D b, P b##_, D convolution, int algorithm, P workspace,           \
                   size_t size, P beta, D c, P c##_) {                                                               \
        return convolve(#Run, kind, of_forward, convolution, alpha, beta);                                           \
    }
#define AND_DATA(x, w, y) x, x##_, w, w##_, y, y##_
CONVOLUTION(cudnnConvolutionForward, Forward, FORWARD, x, w, y, x, w, y, AND_DATA(x, w, y))
CONVOLUTION(cudnnConvolutionBackwardData, BackwardData, BACKWARD_DATA, w, dy, dx, dy, w, dx, AND_DATA(dx, w, dy))
CONVOLUTION(cudnnConvolutionBackwardFilter, BackwardFilter, BACKWARD_FILTER, x, dy, dw, x, dy, dw, AND_DATA(x, dw, dy))

// ---- Recurrent networks ------------------------------------------------------------------------------------------

API Status cudnnSetRNNDescriptor_v6(Handle h, D d, int hidden, int layers, D dropout, int input, int both, int cell,
                                    int algorithm, int compute) {
    d->hidden = hidden;
    d->layers = layers;
    d->directions = 1 + both;
    d->cell = cell;
    d->compute = compute;
    d->coefficient = dropout->coefficient;
    return 0;
}
API Status cudnnRNNSetClip(Handle h, D d, int mode, int nan, double low, double high) { return d->clipped = mode, 0; }
API Status cudnnSetRNNMatrixMathType(D d, int math) { return d->math = math, 0; }
API Status cudnnSetRNNProjectionLayers(Handle h, D d, int size) { return d->projected = size, 0; }
static int gates_of(D d) { return d->cell == LSTM ? 4 : d->cell == GRU ? 3 : 1; }
API Status cudnnGetRNNParamsSize(Handle h, D d, D x, size_t *bytes, int dtype) {
    size_t gates = gates_of(d), hidden = d->hidden, weights = 0;
    size_t out = d->projected ? (size_t)d->projected : hidden, in = x->sizes[1];
    for (int layer = 0; layer < d->layers; layer++, in = out * d->directions) {
        weights += d->directions * (gates * hidden * (in + out + 2) + (out != hidden ? out * hidden : 0));
    }
    return *bytes = weights * (dtype == F16 ? 2 : dtype == F64 ? 8 : 4), 0;
}
API Status cudnnGetRNNWorkspaceSize(Handle h, D d, int steps, P x, size_t *size) { return *size = WORKSPACE, 0; }
API Status cudnnGetRNNTrainingReserveSize(Handle h, D d, int steps, D *x, size_t *size) {
    return *size = computing ? recurrent_reserve(d, steps, x[0]->sizes[0]) : WORKSPACE, 0;
}

// The tensor that is shown, and the arguments: descriptors and data. Those that only attention has are not read.
#define RECURRENT(name, x, arguments, computed)                                                               \
    API Status name(Handle h, D d, UNPACKED arguments) {                                                      \
        record("call", #name, "x=%s compute=%s math=%s hidden=%d layers=%d directions=%d gates=%d", show(x),  \
               dtype_name(d->compute), math_name(d->math), d->hidden, d->layers, d->directions, gates_of(d)); \
        if (computing) computed;                                                                              \
        return 0;                                                                                             \
    }
#define WITH_DATA(x) D x, P x##_
#define UNPACKED(...) __VA_ARGS__
#define FORWARD_DATA                                                                                                 \
    WITH_DATA(x), WITH_DATA(hx), WITH_DATA(cx), WITH_DATA(w), WITH_DATA(y), WITH_DATA(hy), WITH_DATA(cy), P k, P k_, \
        P c, P c_, P i, P i_, P q, P q_, P workspace, size_t size
RECURRENT(cudnnRNNForwardTrainingEx, x, (FORWARD_DATA, P reserve, size_t reserved),
          recurrent_forward(d, x, x_, hx, hx_, cx, cx_, w, w_, y, y_, hy, hy_, cy, cy_, reserve))
RECURRENT(cudnnRNNForwardInferenceEx, x, (FORWARD_DATA),
          recurrent_forward(d, x, x_, hx, hx_, cx, cx_, w, w_, y, y_, hy, hy_, cy, cy_, NULL))
RECURRENT(cudnnRNNBackwardDataEx, y,
          (WITH_DATA(y), WITH_DATA(dy), P dc, P dc_, WITH_DATA(dhy), WITH_DATA(dcy), WITH_DATA(w), WITH_DATA(hx),
           WITH_DATA(cx), WITH_DATA(dx), WITH_DATA(dhx), WITH_DATA(dcx), P dk, P dk_, P workspace, size_t size,
           P reserve, size_t reserved),
          recurrent_backward(d, y, dy, dy_, dhy, dhy_, dcy, dcy_, w, w_, hx, hx_, cx, cx_, dx, dx_, dhx, dhx_, dcx,
                             dcx_, reserve))
RECURRENT(cudnnRNNBackwardWeightsEx, x,
          (WITH_DATA(x), WITH_DATA(hx), WITH_DATA(y), P workspace, size_t size, WITH_DATA(dw), P reserve,
           size_t reserved),
          recurrent_backward_weights(d, x, x_, hx, hx_, dw, dw_, reserve))

// ---- All else that reads a tensor --------------------------------------------------------------------------------

#define NORM(name, out, arguments, compute)                                                     \
    API Status name(Handle h, int mode, P alpha, P beta, UNPACKED arguments) {                  \
        record("call", #name, "x=%s y=%s parameters=%s", show(x), show(out), show(parameters)); \
        if (computing) compute;                                                                 \
        return 0;                                                                               \
    }
NORM(cudnnBatchNormalizationForwardTraining, y,
     (D x, P x_, D y, P y_, D parameters, P gamma, P bias, double factor, float *mean, float *var, double eps,
      float *saved_mean, float *saved_inverse),
     norm_training(mode, alpha, beta, x, x_, y, y_, parameters, gamma, bias, factor, mean, var, eps, saved_mean,
                   saved_inverse))
NORM(cudnnBatchNormalizationForwardInference, y,
     (D x, P x_, D y, P y_, D parameters, P gamma, P bias, const float *mean, const float *var, double eps),
     norm_inference(mode, alpha, beta, x, x_, y, y_, parameters, gamma, bias, mean, var, eps))
NORM(cudnnBatchNormalizationBackward, dx,
     (P alpha_p, P beta_p, D x, P x_, D dy, P dy_, D dx, P dx_, D parameters, P gamma, float *dgamma, float *dbias,
      double eps, const float *saved_mean, const float *saved_inverse),
     norm_backward(mode, alpha, beta, alpha_p, beta_p, x, x_, dy, dy_, dx, dx_, parameters, gamma, dgamma, dbias, eps,
                   saved_mean, saved_inverse))

#define POOLING(name, arguments, compute)                         \
    API Status name(Handle h, UNPACKED arguments) {               \
        record("call", #name, "x=%s y=%s", show(x), show(y));     \
        if (computing) compute;                                   \
        return 0;                                                 \
    }
// The tensor that is shown is the first.
#define READER(name, shown, arguments, compute)     \
    API Status name(Handle h, UNPACKED arguments) { \
        record("call", #name, "x=%s", show(shown)); \
        if (computing) compute;                     \
        return 0;                                   \
    }
READER(cudnnActivationForward, x, (D d, P alpha, D x, P x_, P beta, D y, P y_),
       activation_forward(d, alpha, x, x_, beta, y, y_))
READER(cudnnActivationBackward, y, (D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_),
       activation_backward(d, alpha, y, y_, dy, dy_, x, x_, beta, dx, dx_))
POOLING(cudnnPoolingForward, (D d, P alpha, D x, P x_, P beta, D y, P y_),
       pooling_forward(d, alpha, x, x_, beta, y, y_))
POOLING(cudnnPoolingBackward, (D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_),
       pooling_backward(d, alpha, y, y_, dy, dy_, x, x_, beta, dx, dx_))
READER(cudnnSoftmaxForward, x, (int algorithm, int mode, P alpha, D x, P x_, P beta, D y, P y_),
       softmax_forward(algorithm, mode, alpha, x, x_, beta, y, y_))
READER(cudnnSoftmaxBackward, y, (int algorithm, int mode, P alpha, D y, P y_, D dy, P dy_, P beta, D dx, P dx_),
       softmax_backward(algorithm, mode, alpha, y, y_, dy, dy_, beta, dx, dx_))
READER(cudnnConvolutionBackwardBias, dy, (P alpha, D dy, P dy_, P beta, D db, P db_),
       bias_backward(alpha, dy, dy_, beta, db, db_))
READER(cudnnAddTensor, c, (P alpha, D a, P a_, P beta, D c, P c_), add_tensor(alpha, a, a_, beta, c, c_))
READER(cudnnDropoutForward, x, (D d, D x, P x_, D y, P y_, unsigned char *reserve),
       dropout_forward(d, x, x_, y, y_, reserve))
READER(cudnnDropoutBackward, dy, (D d, D dy, P dy_, D dx, P dx_, unsigned char *reserve),
       dropout_backward(d, dy, dy_, dx, dx_, reserve))
API Status cudnnSetSpatialTransformerNdDescriptor(D d, int sampler, int dtype, int dims, const int *sizes) {
    return set(d, dtype, dims, sizes, 0);
}
READER(cudnnSpatialTfGridGeneratorForward, d, (D d, P theta, P grid), grid_forward(d, theta, grid))
READER(cudnnSpatialTfGridGeneratorBackward, d, (D d, P dgrid, P dtheta), grid_backward(d, dgrid, dtheta))
READER(cudnnSpatialTfSamplerForward, x, (D d, P alpha, D x, P x_, P grid, P beta, D y, P y_),
       sampler_forward(d, alpha, x, x_, grid, beta, y, y_))
READER(cudnnSpatialTfSamplerBackward, x,
       (D d, P alpha, D x, P x_, P beta, D dx, P dx_, P alpha_grid, D dy, P dy_, P grid, P beta_grid, P dgrid),
       sampler_backward(d, alpha, x, x_, beta, dx, dx_, alpha_grid, dy, dy_, grid, beta_grid, dgrid))

API Status cudnnDropoutGetStatesSize(Handle h, size_t *size) { return *size = 1 << 16, 0; }
API Status cudnnDropoutGetReserveSpaceSize(D x, size_t *size) {
    *size = 1;
    for (int i = 0; i < x->dims; i++) *size *= x->sizes[i];
    return *size = *size / 8 + 16, 0;
}
