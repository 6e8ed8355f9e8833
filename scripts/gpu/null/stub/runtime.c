// CUDA's runtime and driver: devices, memory that is the host's, streams, and launches that are recorded.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels.h"
#include "record.h"

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_FUNCTION = 98, INVALID_DEVICE = 101 };


// ---- Devices ----------------------------------------------------------------------------------------------------

static int devices = 1, capability = 70, gib = 16;  // a V100's memory
#define DEVICE_BYTES ((size_t)gib << 30)

static void read_setting(const char *variable, int *value) {
    if (getenv(variable)) *value = atoi(getenv(variable));
}

// Only while the library loads: MXNet's threads call CUDA at any time, and getenv fails beside a setenv of Python's.
__attribute__((constructor)) static void read_settings(void) {
    read_setting("NG_DEVICES", &devices);
    read_setting("NG_CC", &capability);
    read_setting("NG_GIB", &gib);
    read_setting("NG_COMPUTES", &computing);
}

API void ng_devices(int count) { devices = count; }

// cudaDeviceProp of CUDA 11.
typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t total_memory, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block_dims[3], grid_dims[3], clock_rate;
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int overlap, processors, timeout, integrated, maps_host, compute_mode;
    int textures[40];  // and surfaces
    size_t surface_alignment;
    int concurrent_kernels, ecc, bus, device, domain, tcc, copy_engines, unified_addressing, memory_clock, bus_width,
        l2;
    int persisting_l2, threads_per_processor, stream_priorities, global_l1, local_l1;
    size_t shared_per_processor;
    int registers_per_processor, managed_memory, is_multi_gpu, multi_gpu_group, host_atomics, single_to_double;
    int pageable, concurrent_managed, preemption, host_pointer, cooperative, cooperative_multi;
    size_t shared_per_block_optin;
    int pageable_by_host, direct_managed, blocks_per_processor, window;
    size_t reserved_shared;
} DeviceProperties;

API Status cudaGetDeviceCount(int *count) { return *count = devices, 0; }
API Status cudaGetDevice(int *device) { return *device = current_device, 0; }
API Status cudaDriverGetVersion(int *version) { return *version = 11020, 0; }
API Status cuDeviceGet(int *device, int number) { return *device = number, 0; }

API Status cudaSetDevice(int device) {
    if (device < 0 || device >= devices) return INVALID_DEVICE;
    current_device = device;
    return 0;
}

API Status cudaGetDeviceProperties(DeviceProperties *p, int device) {
    *p = (DeviceProperties){.name = "null GPU", .total_memory = DEVICE_BYTES, .shared_per_block = 49152};
    p->registers_per_block = p->registers_per_processor = p->constant_memory = 65536;
    p->warp_size = 32;
    p->pitch = 0x7fffffff;
    p->threads_per_block = p->block_dims[0] = p->block_dims[1] = 1024;
    p->block_dims[2] = 64;
    p->grid_dims[0] = 0x7fffffff;
    p->grid_dims[1] = p->grid_dims[2] = 65535;
    p->clock_rate = 1530000;
    p->memory_clock = 877000;
    p->bus_width = 4096;
    p->l2 = 6 << 20;
    p->major = capability / 10;
    p->minor = capability % 10;
    p->processors = 80;
    p->copy_engines = 2;
    p->threads_per_processor = 2048;
    p->shared_per_processor = p->shared_per_block_optin = 98304;
    p->blocks_per_processor = 32;
    p->maps_host = p->concurrent_kernels = p->unified_addressing = p->managed_memory = 1;
    return 0;
}

API Status cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {               // the numbers of cudaDeviceAttr
        case 1: *value = 1024; break;  // threads of a block
        case 2:
        case 3: *value = 1024; break;        // a block's first and second side
        case 4: *value = 64; break;          // its third
        case 5: *value = 0x7fffffff; break;  // a grid's first side
        case 6:
        case 7: *value = 65535; break;  // its second and third
        case 8: *value = 49152; break;  // shared memory of a block
        case 10: *value = 32; break;    // threads of a warp
        case 16: *value = 80; break;    // multiprocessors
        case 39: *value = 2048; break;  // threads of a multiprocessor
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        case 81:
        case 97: *value = 98304; break;  // shared memory of a multiprocessor, and of a block that asks
        case 95: *value = 1; break;      // cooperative launches
        default: *value = 0; record("unknown", "cudaDeviceGetAttribute", "attribute=%d", attribute);
    }
    return 0;
}

API Status cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = one != other, 0; }
API Status cudaDeviceGetP2PAttribute(int *value, int attribute, int one, int other) { return *value = one != other, 0; }

static __thread char message[64];
API const char *cudaGetErrorString(Status status) { return sprintf(message, "null GPU: status %d", status), message; }
API const char *cudaGetErrorName(Status status) { return cudaGetErrorString(status); }
API const char *cudnnGetErrorString(Status status) { return cudaGetErrorString(status); }
API Status cuGetErrorString(Status status, const char **text) { return *text = cudaGetErrorString(status), 0; }

// ---- Memory: the host's, real only where somebody writes ---------------------------------------------------------

typedef struct Block {
    void *at;
    size_t size;
    int device;  // -1: pinned memory of the host
    struct Block *next;
} Block;

enum { MAPPED_FROM = 65536, SLOTS = 4096 };  // bytes from which a block is pages of its own
static Block *blocks[SLOTS];
static size_t live[MAX_DEVICES], peak[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

API size_t ng_peak_bytes(int device) { return peak[device]; }
API size_t ng_live_bytes(int device) { return live[device]; }

static Block **slot_of(const void *at) { return &blocks[((size_t)at >> 9) * 2654435761u >> 20 & (SLOTS - 1)]; }
static size_t pages(size_t size) { return (size + 4095) & ~(size_t)4095; }

static void *take(size_t size, int device) {
    void *at;
    if (size >= MAPPED_FROM) {
        at = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return NULL;
    } else {
        at = memset(memalign(512, size + !size), 0, size);
    }
    Block *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (Block){at, size, device, *slot_of(at)};
    *slot_of(at) = block;
    if (device >= 0 && (live[device] += size) > peak[device]) peak[device] = live[device];
    pthread_mutex_unlock(&lock);
    return at;
}

API Status cudaMalloc(void **at, size_t size) {
    record("alloc", "cudaMalloc", "bytes=%zu", size);
    *at = live[current_device] + size <= DEVICE_BYTES ? take(size, current_device) : NULL;
    return *at ? 0 : OUT_OF_MEMORY;
}
API Status cudaMallocPitch(void **at, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) & ~(size_t)511;
    return cudaMalloc(at, *pitch * height);
}
API Status cudaHostAlloc(void **at, size_t size, unsigned flags) { return (*at = take(size, -1)) ? 0 : OUT_OF_MEMORY; }
API Status cudaFree(void *at) {
    if (!at) return 0;
    pthread_mutex_lock(&lock);
    Block **link = slot_of(at);
    while (*link && (*link)->at != at) link = &(*link)->next;
    Block *block = *link;
    if (block) *link = block->next;
    if (block && block->device >= 0) live[block->device] -= block->size;
    pthread_mutex_unlock(&lock);
    if (!block) return INVALID_VALUE;
    if (block->size >= MAPPED_FROM)
        munmap(at, pages(block->size));
    else
        free(at);
    free(block);
    return 0;
}
API Status cudaFreeHost(void *at) { return cudaFree(at); }
API Status cudaMemGetInfo(size_t *available, size_t *total) {
    *total = DEVICE_BYTES;
    *available = DEVICE_BYTES - live[current_device];
    return 0;
}

static Status record_copy(size_t size, int kind) {
    static const char *KINDS[] = {"on host", "to device", "to host", "on device", "anywhere"};  // of cudaMemcpyKind
    record("copy", KINDS[kind], "bytes=%zu", size);
    return 0;
}
static Status copy(void *to, const void *from, size_t size, int kind) {
    memmove(to, from, size);
    return record_copy(size, kind);
}
API Status cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size, kind); }
API Status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Handle stream) {
    return copy(to, from, size, kind);
}
API Status cudaMemcpyPeerAsync(void *to, int receiver, const void *from, int sender, size_t size, Handle stream) {
    memmove(to, from, size);
    record("copy", "between devices", "bytes=%zu from=%d to=%d", size, sender, receiver);
    return 0;
}
API Status cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width,
                             size_t height, int kind, Handle stream) {
    for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
    return record_copy(width * height, kind);
}
API Status cudaMemsetAsync(void *at, int value, size_t size, Handle stream) {
    memset(at, value, size);
    record("fill", "cudaMemsetAsync", "bytes=%zu", size);
    return 0;
}

// ---- Streams and events: everything happens at once --------------------------------------------------------------

API Status cudaStreamCreate(Handle *stream) { return *stream = new_handle(), 0; }
API Status cudaStreamDestroy(Handle stream) { return free(stream), 0; }
API Status cudaEventCreateWithFlags(Handle *event, unsigned flags) { return *event = new_handle(), 0; }
API Status cudaEventDestroy(Handle event) { return free(event), 0; }
API Status cuDevicePrimaryCtxRetain(Handle *context, int device) { return *context = new_handle(), 0; }

// ---- Kernels -----------------------------------------------------------------------------------------------------

typedef struct Kernel {
    const void *host;
    const char *mangled;
    char *name;  // once it was launched
    void (*imitation)(void **arguments, Sides grid);
    Translated *translated;  // where the GPU computes
    struct Kernel *next;
} Kernel;

static Kernel *kernels[SLOTS * 16];
static Kernel **kernel_slot(const void *host) {
    return &kernels[((size_t)host >> 2) * 2654435761u >> 16 & (SLOTS * 16 - 1)];
}

API Handle __cudaRegisterFatBinary(void *binary) { return new_handle(); }
API void __cudaRegisterFatBinaryEnd(Handle binary) {}
API void __cudaUnregisterFatBinary(Handle binary) {}
API char __cudaInitModule(Handle binary) { return 1; }
API void __cudaRegisterVar(void) {}
API void __cudaRegisterFunction(Handle binary, const void *host, void *stub, const char *mangled) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    *kernel = (Kernel){.host = host, .mangled = mangled, .next = *kernel_slot(host)};
    *kernel_slot(host) = kernel;
}

typedef struct {
    Sides grid, block;
    size_t shared;
    Handle stream;
} Configuration;

static __thread Configuration configurations[8];
static __thread int depth;

API unsigned __cudaPushCallConfiguration(Sides grid, Sides block, size_t shared, Handle stream) {
    configurations[depth++ & 7] = (Configuration){grid, block, shared, stream};
    return 0;
}
API Status __cudaPopCallConfiguration(Sides *grid, Sides *block, size_t *shared, Handle *stream) {
    Configuration found = configurations[--depth & 7];
    *grid = found.grid, *block = found.block, *shared = found.shared, *stream = found.stream;
    return 0;
}

// cudaFuncAttributes.
typedef struct {
    size_t shared, constants, local;
    int threads_per_block, registers, ptx, binary, cache, dynamic_shared, carveout;
} KernelAttributes;

API Status cudaFuncGetAttributes(KernelAttributes *attributes, const void *host) {
    *attributes = (KernelAttributes){.threads_per_block = 1024, .registers = 32, .dynamic_shared = 49152};
    attributes->ptx = attributes->binary = capability;
    return 0;
}
API Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int threads) {
    return *count = threads > 0 ? 2048 / threads : 1, 0;
}

// What the tests set: the results of the kernels that look for overflows, on each device.
static float norm[MAX_DEVICES], not_finite[MAX_DEVICES];
API void ng_set_norm(int device, double value) { norm[device] = value; }
API void ng_set_finite(int device, int finite) { not_finite[device] = !finite; }

static void multi_sum_sq(void **arguments, Sides grid) {
    float *sums = *(float **)arguments[2];
    for (unsigned i = 0; i < grid.x; i++) sums[i] = norm[current_device];
}
static void all_finite(void **arguments, Sides grid) { **(float **)arguments[2] = !not_finite[current_device]; }
static void multi_all_finite(void **arguments, Sides grid) { **(float **)arguments[1] = !not_finite[current_device]; }

// Copies by Concat and SliceChannel, so that what the former write arrives at the host: mshadow's kernel that saves
// one plan of FP32 into another, where one is a slice of the middle dimension of three and the other is contiguous.
#define PLAN(expression) "mshadow::expr::Plan<" expression ", float>"
#define TENSOR "mshadow::Tensor<mshadow::gpu, 3, float>"
#define CONTIGUOUS PLAN(TENSOR)
#define SLICE PLAN("mshadow::expr::SliceExp<" TENSOR ", mshadow::gpu, float, 3, 2>")
#define SAVE "void mshadow::cuda::MapPlanKernel<mshadow::sv::saveto, 8, "

typedef struct {
    float *at;
    int stride;
} Contiguous;
typedef struct {
    Contiguous source;
    int height, begin, source_channels, channels;
} Slice;

static void copy_slice(const int *shape, const Slice *slice, const Contiguous *contiguous, int into_slice) {
    for (int i = 0; i < shape[0]; i++) {
        int row = i % slice->height, channel = i / slice->height % slice->channels + slice->begin;
        int sample = i / slice->height / slice->channels;
        int sliced = (sample * slice->source_channels + channel) * slice->height + row;
        float *one = slice->source.at + (size_t)sliced * slice->source.stride;
        float *other = contiguous->at + (size_t)i * contiguous->stride;
        memcpy(into_slice ? one : other, into_slice ? other : one, shape[1] * sizeof(float));
    }
}
enum { COPIED_BLOCKS = 256 };  // scalars and statistics, not activations
static void into_slice(void **arguments, Sides grid) {
    if (grid.x <= COPIED_BLOCKS) copy_slice(arguments[2], arguments[0], arguments[3], 1);
}
static void out_of_slice(void **arguments, Sides grid) {
    if (grid.x <= COPIED_BLOCKS) copy_slice(arguments[2], arguments[3], arguments[0], 0);
}

// The zeros that checks of indices start from: what they then do not write says that all are in range.
#define ZEROS(type) "void mxnet::op::mxnet_op::mxnet_generic_kernel<mxnet::op::mxnet_op::set_to_int<0>, " type "*>"
static void zeros(void **arguments, Sides grid, size_t size) {
    if (grid.x == 1) memset(*(void **)arguments[1], 0, *(int *)arguments[0] * size);
}
static void zeros_1(void **arguments, Sides grid) { zeros(arguments, grid, 1); }
static void zeros_2(void **arguments, Sides grid) { zeros(arguments, grid, 2); }
static void zeros_4(void **arguments, Sides grid) { zeros(arguments, grid, 4); }
static void zeros_8(void **arguments, Sides grid) { zeros(arguments, grid, 8); }

static const struct {
    const char *name;
    void (*imitation)(void **arguments, Sides grid);
} IMITATIONS[] = {
    {"void mxnet::op::GlobalReductionKernel<", multi_sum_sq},
    {"void mxnet::op::MultiAllFiniteGPUKernel<", multi_all_finite},
    {"void mxnet::op::AllFiniteGPUKernel<", all_finite},
    {ZEROS("char"), zeros_1},
    {ZEROS("mshadow::half::half_t"), zeros_2},
    {ZEROS("int"), zeros_4},
    {ZEROS("float"), zeros_4},
    {ZEROS("long"), zeros_8},
    {ZEROS("double"), zeros_8},
    {SAVE SLICE ", " CONTIGUOUS, into_slice},
    {SAVE CONTIGUOUS ", " SLICE, out_of_slice},
};

extern char *__cxa_demangle(const char *mangled, char *buffer, size_t *length, int *status);

static char *demangled(const char *mangled) {
    int status;
    char *name = __cxa_demangle(mangled, NULL, NULL, &status);
    return name ? name : strdup(mangled);
}

static void find_name(Kernel *kernel) {
    char *name = demangled(kernel->mangled);
    for (size_t i = 0; i < sizeof IMITATIONS / sizeof *IMITATIONS; i++) {
        if (!strncmp(name, IMITATIONS[i].name, strlen(IMITATIONS[i].name))) kernel->imitation = IMITATIONS[i].imitation;
    }
    __atomic_store_n(&kernel->name, name, __ATOMIC_RELEASE);
}

// The sum of the sizes that a kernel for many arrays has by value: their number, the largest of them, and each.
static long sum_of_sizes(const void *parameters) {
    const size_t *sizes = (const size_t *)parameters + 2;
    long sum = 0;
    for (int i = 0; i < *(const int *)parameters; i++) sum += sizes[i];
    return sum;
}
// How many elements a kernel works on, of those that nearly all operators share and of the step's; 0 for others.
static long elements(const char *name, void **arguments) {
    if (strstr(name, "MultiSGDKernel<")) return sum_of_sizes(arguments[1]);
    if (strstr(name, "MultiAllFiniteGPUKernel<")) return sum_of_sizes(arguments[0]);
    if (strstr(name, "mxnet_generic_kernel")) return *(int *)arguments[0];
    const int *shape = strstr(name, "MapPlan") ? arguments[2] : NULL;
    return shape ? (long)shape[0] * shape[1] : 0;
}

// The bytes from an address to the end of the block that it is in; 0 for none of the device's.
static size_t room_at(const char *at) {
    size_t found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS && !found; i++)
        for (Block *b = blocks[i]; b && !found; b = b->next)
            if (at >= (char *)b->at && at < (char *)b->at + b->size) found = (char *)b->at + b->size - at;
    pthread_mutex_unlock(&lock);
    return found;
}

// A kernel's arguments as record.py reads them: "p" and the room at a pointer, a whole number, or "-", with commas.
static const char *show_arguments(const char *name, void **arguments) {
    static __thread char text[512];
    char *end = text;
    const char *last = strrchr(name, ')'), *at = last;
    for (int depth = 0; at && at > name && (*at != '(' || depth != 1); at--) depth += (*at == ')') - (*at == '(');
    *end = 0;
    for (int depth = 0, i = 0; at && at < last && end < text + 480; i++) {
        const char *begin = ++at;
        for (; at < last && (depth || *at != ','); at++)
            depth += (*at == '<' || *at == '(') - (*at == '>' || *at == ')');
        if (i) *end++ = ',';
        size_t length = at - begin - strspn(begin, " ");
        begin += strspn(begin, " ");
        if (length && at[-1] == '*')
            end += sprintf(end, "p%zu", room_at(*(char **)arguments[i]));
        else if ((length == 3 && !strncmp(begin, "int", 3)) || (length == 12 && !strncmp(begin, "unsigned int", 12)))
            end += sprintf(end, "%d", *(int *)arguments[i]);
        else if ((length == 4 && !strncmp(begin, "long", 4)) || (length == 13 && !strncmp(begin, "unsigned long", 13)))
            end += sprintf(end, "%ld", *(long *)arguments[i]);
        else
            end += sprintf(end, "-");
    }
    return text;
}

static int launchable(Sides grid, Sides block) {
    return grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && block.x && block.y && block.z &&
           (size_t)block.x * block.y * block.z <= 1024;
}

// As CUDA keeps it, for MXNet asks after every launch instead of looking at what the launch returned.
static __thread Status last_error;
API Status cudaPeekAtLastError(void) { return last_error; }
API Status cudaGetLastError(void) {
    Status found = last_error;
    return last_error = 0, found;
}

#define LAUNCH(kind, name, grid, block, elements, arguments)                                                         \
    record(kind, name, "grid=%ux%ux%u block=%ux%ux%u elements=%ld arguments=%s", (grid).x, (grid).y, (grid).z,       \
           (block).x, (block).y, (block).z, elements, is_recording() ? show_arguments(name, arguments) : "")

API Status cudaLaunchKernel(const void *host, Sides grid, Sides block, void **arguments, size_t shared, Handle stream) {
    Kernel *kernel = *kernel_slot(host);
    while (kernel && kernel->host != host) kernel = kernel->next;
    if (!kernel) return INVALID_FUNCTION;
    if (!kernel->name) find_name(kernel);
    if (!launchable(grid, block)) {
        LAUNCH("refused", kernel->name, grid, block, 0l, arguments);
        return last_error = INVALID_CONFIGURATION;
    }
    if (computing) {
        if (!kernel->translated) kernel->translated = translated(NULL, kernel->mangled);
        run_kernel(kernel->translated, grid, block, shared, arguments);
    } else if (kernel->imitation) {
        kernel->imitation(arguments, grid);
    }
    LAUNCH("launch", kernel->name, grid, block, elements(kernel->name, arguments), arguments);
    return 0;
}

// The driver's functions, which MXNet uses for the kernels that its fusion compiles.
typedef struct {
    char *signature;
    Translated *translated;  // where the GPU computes
} Fused;

// A module is the path of its cubin where the GPU computes.
API Status cuModuleLoadData(Handle *module, const char *ptx) {
    record("compile", "cuModuleLoadData", "bytes=%zu", strlen(ptx));
    return *module = computing ? assembled(ptx) : new_handle(), 0;
}
API Status cuModuleLoadDataEx(Handle *module, const char *ptx) { return cuModuleLoadData(module, ptx); }
API Status cuModuleUnload(Handle module) { return free(module), 0; }
API Status cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    Fused *fused = malloc(sizeof *fused);
    *fused = (Fused){demangled(name), computing ? translated(module, name) : NULL};
    return *function = fused, 0;
}
// The size of what the kernel's parameter with this number points to, by the kernel's name and signature; 0 if it is no
// pointer, -1 if there is no such parameter.
static int pointed(const char *signature, int number) {
    const char *at = strchr(signature, '(') + 1;
    for (; number && (at = strchr(at, ',')); number--) at += 2;
    if (!at || *at == ')') return -1;
    if (at[strcspn(at, ",)") - 1] != '*') return 0;
    return strstr(at, "__half*") == at                                 ? 2
           : strstr(at, "double*") == at || strstr(at, "long*") == at ? 8
           : strstr(at, "float*") == at || strstr(at, "int*") == at   ? 4
                                                                       : 1;
}

// Whether a fused kernel would end a real GPU's process: it loads and stores as many elements at a time as make 4 bytes
// of its smallest dtype (fused_op.cu), and a GPU takes addresses only that are a multiple of what is loaded.
static int is_misaligned(const char *signature, void **arguments) {
    int least = 4, size;
    for (int i = 0; (size = pointed(signature, i)) >= 0; i++)
        if (size && size < least) least = size;
    for (int i = 0; (size = pointed(signature, i)) >= 0; i++)
        if (size && *(size_t *)arguments[i] % (size * (4 / least))) return 1;
    return 0;
}

API Status cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, Handle stream, void **arguments) {
    Sides grid = {gx, gy, gz}, block = {bx, by, bz};
    const Fused *fused = function;
    int refused = is_misaligned(fused->signature, arguments);
    if (refused && computing) cannot("misaligned addresses in", fused->signature);
    if (computing) run_kernel(fused->translated, grid, block, shared, arguments);
    LAUNCH(refused ? "refused" : "fused", fused->signature, grid, block, *(long *)arguments[0], arguments);
    return 0;
}
