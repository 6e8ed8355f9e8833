// Runs kernels from their machine code: each is translated when it is first launched, by a child process, or was once.
#define _GNU_SOURCE
#include "kernels.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK_SIDES = 0, GRID_SIDES = 12, STACK_POINTER = 0x28, BANK = 8192 };  // bytes of constant bank 0

// As sim/machine.h has it.
typedef struct {
    Sides grid, block;
    unsigned shared_bytes, local_bytes;
    const unsigned char *bank0;
} Launch;

struct Translated {
    char *cubin, *mangled;
    void (*launch)(const Launch *);
    int parameters, base, shared, local;
    const int (*parameter)[2];  // offset from the base, and bytes
    Translated *next;
};
static Translated *kernels;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The first line that a command prints.
static void ask(const char *command, char *answer, int room) {
    FILE *pipe = popen(command, "r");
    if (!pipe || !fgets(answer, room, pipe)) answer[0] = 0;
    if (pipe) pclose(pipe);
    answer[strcspn(answer, "\n")] = 0;
}

static unsigned long hash_of(const char *text, unsigned long hash) {
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ul;
    return hash;
}
static const unsigned long HASH_OF_NOTHING = 14695981039346656037ul;

static int number(void *library, const char *name) { return *(int *)dlsym(library, name); }

// The path of a kernel's library: a link where it was asked for before, as a child process takes 0.2 s to answer.
static void find_library(const char *cubin, const char *mangled, char *path, int room) {
    char *command, *link;
    unsigned long hash = hash_of(mangled, hash_of(cubin ? cubin : "", HASH_OF_NOTHING));
    if (asprintf(&link, "%s/cache/%s/%016lx.so", getenv("MXMP_SIMGPU_HOME"), getenv("SIMGPU_TRANSLATOR"), hash) < 0 ||
        asprintf(&command, "\"$SIMGPU_PYTHON\" -m gpu.sim.kernel '%s' '%s'", mangled, cubin ? cubin : "") < 0)
        abort();
    if (!access(link, R_OK)) {
        snprintf(path, room, "%s", link);
    } else {
        ask(command, path, room);
        if (!path[0]) cannot("kernel", mangled);
        unlink(link);
        if (symlink(path, link) && errno != EEXIST) cannot("link", link);
    }
    free(command), free(link);
}

static Translated *translate(const char *cubin, const char *mangled) {
    char path[4096];
    find_library(cubin, mangled, path, sizeof path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) cannot("kernel", dlerror());
    Translated *kernel = calloc(1, sizeof *kernel);
    *kernel = (Translated){cubin ? strdup(cubin) : NULL, strdup(mangled), .next = kernels};
    kernel->launch = dlsym(library, "simgpu_launch");
    kernel->parameters = number(library, "simgpu_parameters"), kernel->base = number(library, "simgpu_base");
    kernel->shared = number(library, "simgpu_shared"), kernel->local = number(library, "simgpu_local") & ~15;
    kernel->parameter = dlsym(library, "simgpu_parameter");
    return kernels = kernel;
}

static int is_same(const char *a, const char *b) { return a && b ? !strcmp(a, b) : a == b; }

Translated *translated(const char *cubin, const char *mangled) {
    pthread_mutex_lock(&lock);
    Translated *found = kernels;
    while (found && !(is_same(found->cubin, cubin) && is_same(found->mangled, mangled))) found = found->next;
    if (!found) found = translate(cubin, mangled);
    pthread_mutex_unlock(&lock);
    return found;
}

void run_kernel(Translated *kernel, Sides grid, Sides block, size_t shared, void **arguments) {
    unsigned char bank0[BANK] __attribute__((aligned(16))) = {0};
    memcpy(bank0 + BLOCK_SIDES, &block, sizeof block);
    memcpy(bank0 + GRID_SIDES, &grid, sizeof grid);
    memcpy(bank0 + STACK_POINTER, &kernel->local, sizeof kernel->local);
    for (int i = 0; i < kernel->parameters; i++)
        memcpy(bank0 + kernel->base + kernel->parameter[i][0], arguments[i], kernel->parameter[i][1]);
    Launch launch = {grid, block, kernel->shared + shared, kernel->local, bank0};
    if (getenv("SIMGPU_TRACE")) fprintf(stderr, "simulated GPU: %s\n", kernel->mangled);
    kernel->launch(&launch);
}

// The driver compiles modules for its GPU; ptxas does it here, and what it made is kept under the module's hash.
char *assembled(const char *ptx) {
    char *cubin, *source, *command;
    unsigned long hash = hash_of(ptx, HASH_OF_NOTHING);
    if (asprintf(&cubin, "%s/cache/%016lx.cubin", getenv("MXMP_SIMGPU_HOME"), hash) < 0) abort();
    if (!access(cubin, R_OK)) return cubin;
    if (asprintf(&source, "%s.%d.ptx", cubin, (int)getpid()) < 0) abort();
    FILE *file = fopen(source, "w");
    if (!file || fputs(ptx, file) < 0 || fclose(file)) cannot("write", source);
    if (asprintf(&command, "\"$SIMGPU_PTXAS\" -arch=sm_80 -o '%s.part' '%s' && mv '%s.part' '%s' && rm '%s'", source,
                 source, source, cubin, source) < 0)
        abort();
    if (system(command)) cannot("ptxas", command);
    free(source), free(command);
    return cubin;
}
