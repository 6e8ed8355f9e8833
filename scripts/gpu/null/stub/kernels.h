// The simulated GPU's kernels: machine code that sim/kernel.py has made into libraries.
#pragma once
#include "record.h"

typedef struct {
    unsigned x, y, z;
} Sides;
typedef struct Translated Translated;

// The kernel of this name, of a cubin's file or of MXNet's own. Ends the process where it cannot be translated.
Translated *translated(const char *cubin, const char *mangled);
void run_kernel(Translated *kernel, Sides grid, Sides block, size_t shared, void **arguments);
// The cubin that ptxas makes of a module, as a path to free.
char *assembled(const char *ptx);
