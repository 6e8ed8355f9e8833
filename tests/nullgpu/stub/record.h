// What every file of the null GPU shares: the record, the tests' settings and the names of CUDA's data types.
#pragma once
#include <stddef.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 8

typedef int Status;    // of any CUDA library; 0 is success in all of them
typedef void *Handle;  // of anything that a library creates and only the library looks into

extern __thread int current_device;

// Adds "device <tab> kind <tab> name <tab> details" to the record while recording is on.
void record(const char *kind, const char *name, const char *details, ...) __attribute__((format(printf, 3, 4)));
int setting(const char *variable, int otherwise);
Handle new_handle(void);
