// A kernel whose threads meet: warps of 32 lanes in lockstep, of those that can run the ones at the lowest address.
#include <sys/mman.h>

enum { BY_MASK = 16, BARRIERS = 16, SHARED_ROOM = 1 << 18 };
typedef struct {
    u32 r[REGISTERS][32], ur[64];
    u8 p[7][32], up[7];
    u32 at[32];                                  // the address at which each lane goes on
    u32 exited, waiting, at_barrier;             // masks of lanes
    u32 barrier[BARRIERS][32];                   // of each lane: who meets at its barriers B0, B1 ...
    u32 waits_at[32], waits_for[32], mask[32];   // of a lane that waits: where, at which barrier or BY_MASK, and the mask
    u32 first;                                   // thread of the block
} Warp;

// What a block's warps share.
typedef struct {
    const u8 *bank0;
    u32 ctaid[3], sides[2];
    u8 *local;
    u64 local_bytes, shared;
    u32 all, any, count, kind;            // what lanes give to BAR.RED while they arrive: 0 AND, 1 OR, 2 POPC
    u32 reduced, counted;                 // and what all of them got
} Block;

#define LANES for (u32 l = 0; l < 32; l++) if (active >> l & 1)
#define THREAD (w->first + l)
#define TID_X (THREAD % block->sides[0])
#define TID_Y (THREAD / block->sides[0] % block->sides[1])
#define TID_Z (THREAD / block->sides[0] / block->sides[1])
#define CTAID_X block->ctaid[0]
#define CTAID_Y block->ctaid[1]
#define CTAID_Z block->ctaid[2]
#define LANE l
#define LOCAL (block->local + THREAD * block->local_bytes)
#define SHARED block->shared

// ---- What lanes do together -------------------------------------------------------------------------------------

enum { IDX, UP, DOWN, BFLY };
// The lane from which lane l reads, in its segment; whether there is one.
INLINE u32 shuffle(int way, u32 l, u32 lane, u32 clamp, u8 *ok) {
    u32 segment = clamp >> 8 & 31, least = l & segment, most = least | (clamp & 31 & ~segment), from;
    lane &= 31;
    switch (way) {
        case IDX: from = (lane & ~segment) | least; *ok = from <= most; break;
        case UP: from = l - lane; *ok = (s32)from >= (s32)most; break;
        case DOWN: from = l + lane; *ok = from <= most; break;
        default: from = l ^ lane; *ok = from <= most;
    }
    return *ok ? from & 31 : l;
}
#define vote_ANY(yes, of) ((yes) != 0)
#define vote_ALL(yes, of) ((yes) == (of))
#define vote_EQ(yes, of) ((yes) == 0 || (yes) == (of))
#define reduce_SUM(a, b) ((a) + (b))
#define reduce_MIN(a, b) ((a) < (b) ? (a) : (b))
#define reduce_MAX(a, b) ((a) > (b) ? (a) : (b))
#define reduce_AND(a, b) ((a) & (b))
#define reduce_OR(a, b) ((a) | (b))
#define reduce_XOR(a, b) ((a) ^ (b))
enum { BAR_AND, BAR_OR, BAR_POPC };

INLINE void wait_for(Warp *w, u32 l, u32 at, u32 barrier, u32 mask) {
    w->waiting |= 1u << l;
    w->waits_at[l] = at, w->waits_for[l] = barrier, w->mask[l] = mask;
}
// Lets those go on that wait at the same place for each other.
static void release(Warp *w) {
    u32 go = 0;
    for (u32 l = 0; l < 32; l++) {
        if (!(w->waiting >> l & 1)) continue;
        u32 needed = w->waits_for[l] == BY_MASK ? w->mask[l] : w->barrier[w->waits_for[l]][l], here = 0;
        for (u32 k = 0; k < 32; k++) here |= (u32)((w->waiting >> k & 1) && w->waits_at[k] == w->waits_at[l]) << k;
        if (!(needed & ~w->exited & ~here)) go |= 1u << l;
    }
    w->waiting &= ~go;
}
INLINE void leave(Warp *w, u32 barrier, u32 l) {
    u32 all = w->barrier[barrier][l];
    for (u32 k = 0; k < 32; k++)
        if (all >> k & 1) w->barrier[barrier][k] &= ~(1u << l);
}
// Lanes that can run. None: the warp has ended, or its others wait at the block's barrier.
static u32 runnable(Warp *w) {
    for (;;) {
        u32 can = ~(w->exited | w->waiting | w->at_barrier);
        if (can || !w->waiting) return can;
        u32 before = w->waiting;
        release(w);
        if (w->waiting != before) continue;
        // A WARPSYNC whose other lanes wait where paths join: a GPU lets it go.
        u32 go = 0;
        for (u32 l = 0; l < 32; l++) go |= (u32)((w->waiting >> l & 1) && w->waits_for[l] == BY_MASK) << l;
        w->waiting &= ~go;
        if (go) continue;
        if (!w->at_barrier) STOP("deadlock of a warp");
        return 0;
    }
}

static void run(Warp *w, Block *block);

static void run_block(Warp *warps, u32 count, Block *block) {
    for (;;) {
        u32 left = 0;
        for (u32 k = 0; k < count; k++) {
            if (warps[k].exited != ~0u) run(&warps[k], block);
            left += warps[k].exited != ~0u;
        }
        if (!left) return;
        for (u32 k = 0; k < count; k++)  // a barrier counts warps, not lanes
            if (warps[k].exited != ~0u && !warps[k].at_barrier) STOP("deadlock at a barrier");
        for (u32 k = 0; k < count; k++) warps[k].at_barrier = 0;
        block->reduced = block->kind == BAR_AND ? block->all : block->any, block->counted = block->count;
        block->all = 1, block->any = block->count = 0;
    }
}

// One room for all launches of this kernel by a thread, where the lower 32 bits of addresses are 0: they are what code
// computes. MXNet launches from several threads: each device has its own.
static u8 *shared_room(void) {
    enum { NOTHING_THERE = 0x100000 };  // MAP_FIXED_NOREPLACE
    for (u64 at = 0x100000000000ull;; at += 0x100000000ull) {
        u8 *room = mmap((void *)at, SHARED_ROOM, 3, MAP_PRIVATE | MAP_ANONYMOUS | NOTHING_THERE, -1, 0);
        if (room == (u8 *)at) return room;
        if (room != MAP_FAILED) munmap(room, SHARED_ROOM);
    }
}

void simgpu_launch(const Launch *launch) {
    static __thread u8 *shared;
    if (!shared) shared = shared_room();
    if (launch->shared_bytes > SHARED_ROOM) STOP("too much shared memory");
    const u32 *grid = launch->grid, *sides = launch->block;
    u32 threads = sides[0] * sides[1] * sides[2], count = (threads + 31) / 32;
    Warp *warps = aligned_alloc(64, (sizeof(Warp) * count + 63) / 64 * 64);
    Block block = {launch->bank0, {0}, {sides[0], sides[1]}, .local_bytes = launch->local_bytes, .shared = (u64)shared};
    block.local = malloc(block.local_bytes * count * 32);
    u32 blocks = grid[0] * grid[1] * grid[2], *order = order_of_blocks(blocks);
    for (u32 number = 0; number < blocks; number++) {
        place_block(order ? order[number] : number, grid, block.ctaid);
        memset(shared, 0xff, launch->shared_bytes);  // what nobody has written is no number
        block.all = 1, block.any = block.count = 0;
        for (u32 k = 0; k < count; k++) {
            Warp *w = &warps[k];
            memset(w, 0, sizeof *w);
            w->first = 32 * k;
            w->exited = threads - 32 * k >= 32 ? 0 : ~0u << (threads - 32 * k);
        }
        run_block(warps, count, &block);
    }
    free(warps), free(block.local), free(order);
}
