// What the table of instructions calls (table.py). Registers are u32, and memory is the host's.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned __int128 u128;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef struct {
    u32 word[4];
} quad;
typedef struct {
    float low, high;
} halves;

#define INLINE static inline __attribute__((always_inline))
#define STOP(text) (fprintf(stderr, "simulated GPU: %s in %s\n", text, KERNEL), abort())

// One launch of a kernel, as the stub of CUDA's runtime asks for it.
typedef struct {
    u32 grid[3], block[3], shared_bytes, local_bytes;
    const u8 *bank0;  // the constants of the launch: sizes and parameters
} Launch;

// ---- The order of blocks: the grid's, or by SIMGPU_SHUFFLE, a seed, another one in each launch ---------------------

static u32 random_below(u64 *state, u32 count) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return (*state >> 32) % count;
}
// Numbers of blocks; NULL for the grid's order.
static u32 *order_of_blocks(u32 count) {
    static __thread u64 state;
    const char *seed = getenv("SIMGPU_SHUFFLE");
    if (!seed || count < 2) return NULL;
    if (!state) state = (strtoull(seed, NULL, 10) + 1) * 0x9e3779b97f4a7c15ull;
    u32 *order = malloc(count * sizeof *order);
    for (u32 i = 0; i < count; i++) {
        u32 other = random_below(&state, i + 1);
        order[i] = order[other], order[other] = i;
    }
    return order;
}
static void place_block(u32 number, const u32 *grid, u32 *at) {
    at[0] = number % grid[0], at[1] = number / grid[0] % grid[1], at[2] = number / grid[0] / grid[1];
}

// ---- Bits -------------------------------------------------------------------------------------------------------

#define PAIR(low, high) ((u64)(u32)(low) | (u64)(u32)(high) << 32)
#define BITS(name, to, from)       \
    INLINE to name(from x) {       \
        to y;                      \
        memcpy(&y, &x, sizeof(y)); \
        return y;                  \
    }
BITS(asf, float, u32)
BITS(asu, u32, float)
BITS(asd, double, u64)
BITS(asq, u64, double)

#define U8(x) ((u8)(x))
#define S8(x) ((s8)(x))
#define U16(x) ((u16)(x))
#define S16(x) ((s16)(x))
#define U32(x) ((u32)(x))
#define S32(x) ((s32)(x))
#define U64(x) ((u64)(x))
#define S64(x) ((s64)(x))

#define logic_AND(yes, x) ((yes) & (x))
#define logic_OR(yes, x) ((yes) | (x))
#define logic_XOR(yes, x) ((yes) ^ (x))

#define compare_F(a, b) 0
#define compare_LT(a, b) ((a) < (b))
#define compare_EQ(a, b) ((a) == (b))
#define compare_LE(a, b) ((a) <= (b))
#define compare_GT(a, b) ((a) > (b))
#define compare_NE(a, b) ((a) != (b))
#define compare_GE(a, b) ((a) >= (b))
#define compare_T(a, b) 1
#define choose_MIN(a, b) ((a) < (b))
#define choose_MAX(a, b) ((a) > (b))

INLINE u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 found = 0;
    if (table & 1) found |= ~a & ~b & ~c;
    if (table & 2) found |= ~a & ~b & c;
    if (table & 4) found |= ~a & b & ~c;
    if (table & 8) found |= ~a & b & c;
    if (table & 16) found |= a & ~b & ~c;
    if (table & 32) found |= a & ~b & c;
    if (table & 64) found |= a & b & ~c;
    if (table & 128) found |= a & b & c;
    return found;
}
// Four bytes of eight: each by three bits of select, and by the fourth its sign in all bits.
INLINE u32 permute(u32 a, u32 select, u32 b) {
    u64 from = PAIR(a, b);
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = select >> 4 * i & 15, byte = from >> 8 * (pick & 7) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        found |= byte << 8 * i;
    }
    return found;
}
enum { SHIFT_U32, SHIFT_S32, SHIFT_U64, SHIFT_S64 };
INLINE u32 shift_by(u32 by, int kind, int wraps) {
    u32 width = kind >= SHIFT_U64 ? 64 : 32;
    return wraps ? by & (width - 1) : by < width ? by : width;
}
INLINE u64 shift_L(u32 low, u32 by, u32 high, int kind, int wraps) {
    by = shift_by(by, kind, wraps);
    return by > 63 ? 0 : PAIR(low, high) << by;
}
INLINE u64 shift_R(u32 low, u32 by, u32 high, int kind, int wraps) {
    by = shift_by(by, kind, wraps);
    if (kind == SHIFT_S32 || kind == SHIFT_S64) return (s64)PAIR(low, high) >> (by > 63 ? 63 : by);
    return by > 63 ? 0 : PAIR(low, high) >> by;
}
INLINE u32 leading_one(u32 x, int as_shift) { return !x ? ~0u : as_shift ? __builtin_clz(x) : 31 - __builtin_clz(x); }
INLINE u32 reverse(u32 x) {
    u32 found = 0;
    for (int i = 0; i < 32; i++) found |= (x >> i & 1) << (31 - i);
    return found;
}
INLINE u32 bit_mask(u32 at, u32 size) { return at >= 32 ? 0 : (u32)((size >= 32 ? 0xffffffffull : (1ull << size) - 1) << at); }
INLINE u32 extend_U32(u32 x, u32 size) { return size >= 32 ? x : x & ((1u << size) - 1); }
INLINE u32 extend_S32(u32 x, u32 size) { return size >= 32 ? x : size ? (u32)((s32)(x << (32 - size)) >> (32 - size)) : 0; }

// ---- Memory -----------------------------------------------------------------------------------------------------

#define ACCESS(name, type, kind)                          \
    INLINE kind load_##name(u64 at) {                     \
        type found;                                       \
        memcpy(&found, (void *)at, sizeof found);         \
        return (kind)found;                               \
    }                                                     \
    INLINE void store_##name(u64 at, kind value) {        \
        type stored = (type)value;                        \
        memcpy((void *)at, &stored, sizeof stored);       \
    }
ACCESS(U8, u8, u32)
ACCESS(S8, s8, u32)
ACCESS(U16, u16, u32)
ACCESS(S16, s16, u32)
ACCESS(U32, u32, u32)
ACCESS(U64, u64, u64)
ACCESS(64, u64, u64)
ACCESS(128, quad, quad)

// ---- Rounding: to nearest, down, up, to zero --------------------------------------------------------------------

enum { RN, RM, RP, RZ };  // as x86 numbers them

#define add_RN(a, b) ((a) + (b))
#define mul_RN(a, b) ((a) * (b))
#define fma_RN(a, b, c) __builtin_fmaf(a, b, c)
#define add64_RN(a, b) ((a) + (b))
#define mul64_RN(a, b) ((a) * (b))
#define fma64_RN(a, b, c) __builtin_fma(a, b, c)
#define float_RN(x) ((float)(x))
#define float_of_U64_RN(x) ((float)(u64)(x))
#define float_of_S64_RN(x) ((float)(s64)(x))
#define double_of_U64_RN(x) ((double)(u64)(x))
#define double_of_S64_RN(x) ((double)(s64)(x))

INLINE u32 round_by(u32 mode) {
    u32 before = _mm_getcsr();
    _mm_setcsr((before & ~0x6000u) | mode << 13);
    return before;
}
// The instructions are written out: a compiler may move arithmetic across a change of the mode.
#define TWO(name, mode, type, code)                               \
    INLINE type name##_##mode(type a, type b) {                   \
        u32 before = round_by(mode);                              \
        asm volatile(code " %1, %0, %0" : "+x"(a) : "x"(b));      \
        _mm_setcsr(before);                                       \
        return a;                                                 \
    }
#define THREE(name, mode, type, code)                                     \
    INLINE type name##_##mode(type a, type b, type c) {                   \
        u32 before = round_by(mode);                                      \
        asm volatile(code " %2, %1, %0" : "+x"(a) : "x"(b), "x"(c));      \
        _mm_setcsr(before);                                               \
        return a;                                                         \
    }
#define CONVERT(name, mode, to, from, constraint, code)                                      \
    INLINE to name##_##mode(from a) {                                                        \
        to found = 0;                                                                        \
        u32 before = round_by(mode);                                                         \
        asm volatile(code " %1, %0, %0" : "+x"(found) : constraint(a));                      \
        _mm_setcsr(before);                                                                  \
        return found;                                                                        \
    }
// Above the signed range half of the number, whose last bit says whether anything was below it.
#define UNSIGNED(to, mode)                                                                            \
    INLINE to to##_of_U64_##mode(u64 a) {                                                             \
        return (s64)a >= 0 ? to##_of_S64_##mode(a) : 2 * to##_of_S64_##mode(a >> 1 | (a & 1));        \
    }
#define DIRECTED(mode)                                                \
    TWO(add, mode, float, "vaddss")                                   \
    TWO(mul, mode, float, "vmulss")                                   \
    TWO(add64, mode, double, "vaddsd")                                \
    TWO(mul64, mode, double, "vmulsd")                                \
    THREE(fma, mode, float, "vfmadd213ss")                            \
    THREE(fma64, mode, double, "vfmadd213sd")                         \
    CONVERT(float, mode, float, double, "x", "vcvtsd2ss")             \
    CONVERT(float_of_S64, mode, float, s64, "r", "vcvtsi2ssq")        \
    CONVERT(double_of_S64, mode, double, s64, "r", "vcvtsi2sdq")      \
    UNSIGNED(float, mode)                                             \
    UNSIGNED(double, mode)
DIRECTED(RM)
DIRECTED(RP)
DIRECTED(RZ)

#define double_RN(x) ((double)(x))
#define double_RM double_RN
#define double_RP double_RN
#define double_RZ double_RN

#define to_float(bits) _cvtsh_ss((u16)(bits))
// A double goes to FP32 first, towards zero; a last bit of 1 says that something was cut off, so there is one rounding.
INLINE float to_odd(double x) {
    float found = float_RZ(x);
    return found == x || x != x ? found : asf(asu(found) | 1);
}
#define HALF(mode)                                                                                    \
    INLINE u32 half_of_float_##mode(float x) { return _cvtss_sh(x, mode | _MM_FROUND_NO_EXC); }       \
    INLINE u32 half_of_double_##mode(double x) { return half_of_float_##mode(to_odd(x)); }
HALF(RN)
HALF(RM)
HALF(RP)
HALF(RZ)
#define HALF_OF(x, mode) _Generic((x), float: half_of_float_##mode, double: half_of_double_##mode)(x)
#define half_RN(x) HALF_OF(x, RN)
#define half_RM(x) HALF_OF(x, RM)
#define half_RP(x) HALF_OF(x, RP)
#define half_RZ(x) HALF_OF(x, RZ)
INLINE u32 add_halves(u32 a, u32 b) {
    return half_RN(to_float(a) + to_float(b)) | half_RN(to_float(a >> 16) + to_float(b >> 16)) << 16;
}

// ---- Floating point ---------------------------------------------------------------------------------------------

INLINE float flush(float x, int ftz) { return ftz && !(asu(x) & 0x7f800000) ? asf(asu(x) & 0x80000000) : x; }
INLINE float saturate(float x, int sat) { return !sat ? x : x >= 1 ? 1 : x > 0 ? x : 0; }  // NaN is 0
#define SCALE_D2 0.5
#define SCALE_D4 0.25
#define SCALE_D8 0.125
#define SCALE_M2 2
#define SCALE_M4 4
#define SCALE_M8 8

// A number wins over NaN, and -0 is less than 0.
INLINE float least_of(float a, float b) { return a != a ? b : b != b ? a : a == b ? asf(asu(a) | asu(b)) : a < b ? a : b; }
INLINE float most_of(float a, float b) { return a != a ? b : b != b ? a : a == b ? asf(asu(a) & asu(b)) : a > b ? a : b; }

#define UNORDERED(a, b) ((a) != (a) | (b) != (b))
#define float_F(a, b) 0
#define float_LT(a, b) ((a) < (b))
#define float_EQ(a, b) ((a) == (b))
#define float_LE(a, b) ((a) <= (b))
#define float_GT(a, b) ((a) > (b))
#define float_NE(a, b) ((a) < (b) | (a) > (b))
#define float_GE(a, b) ((a) >= (b))
#define float_NUM(a, b) (!UNORDERED(a, b))
#define float_NAN(a, b) UNORDERED(a, b)
#define float_LTU(a, b) (!((a) >= (b)))
#define float_EQU(a, b) ((a) == (b) | UNORDERED(a, b))
#define float_LEU(a, b) (!((a) > (b)))
#define float_GTU(a, b) (!((a) <= (b)))
#define float_NEU(a, b) ((a) != (b))
#define float_GEU(a, b) (!((a) < (b)))
#define float_T(a, b) 1

// Of FP32 and FP64.
#define whole_RN(x) _Generic((x), float: rintf, double: rint)(x)
#define whole_TRUNC(x) _Generic((x), float: truncf, double: trunc)(x)
#define whole_FLOOR(x) _Generic((x), float: floorf, double: floor)(x)
#define whole_CEIL(x) _Generic((x), float: ceilf, double: ceil)(x)

// Out of range is the nearest number in it; NaN is 0, or the highest bit alone.
#define TO_INTEGER(name, type, least, most, below, above)                                          \
    INLINE type integer_##name(double x, int nan_is_zero) {                                        \
        if (x != x) return nan_is_zero ? 0 : (type)1 << (sizeof(type) * 8 - 1);                    \
        return x <= below ? (type)least : x >= above ? (type)most : (type)x;                       \
    }
TO_INTEGER(U32, u32, 0, UINT32_MAX, 0.0, 0x1p32)
TO_INTEGER(U64, u64, 0, UINT64_MAX, 0.0, 0x1p64)
INLINE u32 integer_S32(double x, int nan_is_zero) {
    if (x != x) return nan_is_zero ? 0 : 1u << 31;
    return x <= -0x1p31 ? 1u << 31 : x >= 0x1p31 ? INT32_MAX : (u32)(s32)x;
}
INLINE u64 integer_S64(double x, int nan_is_zero) {
    if (x != x) return nan_is_zero ? 0 : 1ull << 63;
    return x <= -0x1p63 ? 1ull << 63 : x >= 0x1p63 ? INT64_MAX : (u64)(s64)x;
}

// The functions that a GPU approximates, here rounded to FP32. A GPU takes subnormal numbers for 0, and gives none.
INLINE float mufu_RCP(float x) { return flush(1.0f / flush(x, 1), 1); }
INLINE float mufu_RSQ(float x) { return (float)(1.0 / sqrt((double)flush(x, 1))); }
#define TABULATED(name, expression) \
    static __attribute__((noinline)) float mufu_##name(float x) { return flush((float)(expression), 1); }
TABULATED(EX2, exp2((double)flush(x, 1)))
TABULATED(LG2, log2((double)flush(x, 1)))
TABULATED(SIN, sin(flush(x, 1) * 6.283185307179586476925))  // of turns, not of radians
TABULATED(COS, cos(flush(x, 1) * 6.283185307179586476925))
// The upper halves of FP64 numbers.
INLINE u32 mufu_RCP64H(u32 high) { return asq(1.0 / asd((u64)high << 32)) >> 32; }
INLINE u32 mufu_RSQ64H(u32 high) { return asq(1.0 / sqrt(asd((u64)high << 32))) >> 32; }
// Whether a / b needs the slow way, which gives the same where both work: true wherever the fast one may go wrong.
INLINE u8 division_is_hard(float a, float b) {
    int i = asu(a) >> 23 & 255, j = asu(b) >> 23 & 255;
    return i == 255 || i == 0 || j >= 253 || j < 2 || i - j >= 126 || i - j <= -125 || i < 25;
}
