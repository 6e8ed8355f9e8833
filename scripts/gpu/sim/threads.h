// A kernel whose threads know nothing of each other: one runs after the other.
#define TID_X tid[0]
#define TID_Y tid[1]
#define TID_Z tid[2]
#define CTAID_X ctaid[0]
#define CTAID_Y ctaid[1]
#define CTAID_Z ctaid[2]
#define LANE lane
#define SHARED 0ull

static void thread(const u8 *bank0, const u32 *ctaid, const u32 *tid, u32 lane, u8 *LOCAL);

void simgpu_launch(const Launch *launch) {
    u8 *local = malloc(launch->local_bytes);
    const u32 *grid = launch->grid, *block = launch->block;
    u32 at[3], tid[3], blocks = grid[0] * grid[1] * grid[2], *order = order_of_blocks(blocks);
    for (u32 number = 0; number < blocks; number++) {
        u32 lane = 0;
        place_block(order ? order[number] : number, grid, at);
        for (tid[2] = 0; tid[2] < block[2]; tid[2]++)
            for (tid[1] = 0; tid[1] < block[1]; tid[1]++)
                for (tid[0] = 0; tid[0] < block[0]; tid[0]++) thread(launch->bank0, at, tid, lane++ & 31, local);
    }
    free(local), free(order);
}
