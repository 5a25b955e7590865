
// The two passes for small networks (SMALL), after the text of cuda.cu, whose equations, layouts and results are these.
//
// There a step of a small network is nearly all barriers of a block, loops that hardly begin and values on their way
// through shared memory. Here one warp takes a sequence through time and does all of it. Row i of U_j, so z_j[i], or
// gz_j[i], and the value of m that a row of a module stands for, are lane i % 32's for every j, in its registers: adding
// up suffix sums needs nobody else. What lanes exchange, twice a step, goes through shared memory,
//
//     forward    h = tanh(Wxh x + z_0)      ->     m_k = z_k + Whm[k] h             ->     z_j = z_{j+1} + U_j m_j
//     backward   gz_{j+1} += gz_j           ->     gm_k = gm_k + U_k^T gz_k         ->     ga = Whm^T gm (1 - h^2)
//
// because reading four values back takes as long as one shuffle. A warp needs no barrier for that but __syncwarp. Stores
// to device memory wait for nothing, and inputs are copied to shared memory AHEAD steps early. Weights of the NEAR fastest
// modules and their suffix sums are registers; the others' stay in shared memory, for one step of 2^NEAR.

#ifdef SMALL

constexpr int ROWS = (ALL + 31) / 32;     // that a lane has
constexpr int NEAR = smaller(g, SPECIAL);  // a step at which more modules fire is Number<0>
constexpr bool FAR = NEAR < g;
constexpr int HELD = FAR ? PACKED : 0;  // packed weights in shared memory
constexpr int LAST = FAR ? 0 : g;       // the number of a step at which all modules fire
static_assert(H > 0 && H <= 32 && LANES == 1, "ops/cuda.py chooses otherwise");

constexpr int rows_of(int known) { return (H + (known ? known : g) * M + 31) / 32; }  // the most that a lane has of U_j

// A row of U_j as its lane knows it: the module it belongs to (-1: it is of the h part), which value of it.
struct Row {
    int i, k, o;
    INLINE explicit Row(int own) : i(own * 32 + thread()), k(i < H ? -1 : (i - H) / M), o(i < H ? 0 : (i - H) % M) {}
    INLINE bool of_module() const { return i >= H && i < ALL; }
    INLINE bool of_modules(int most) const { return i >= H && i < H + most * M; }
};

INLINE void hold(real* to, const real* from) {
    for (int e = thread(); e < HELD / 4; e += 32) reinterpret_cast<Quad*>(to)[e] = quads(from)[e];
}
// Row o of what is summed over for module k
INLINE const Quad* summed_row(const real* packed, int k, int o) {
    return quads(packed + module_at(k) + owned(k) * MP) + o;
}

#ifdef FORWARD

constexpr int SUMS_AT = HELD + SUMMED_0 + GP;  // z_j of the lanes' rows, j > NEAR; z_g holds the biases
constexpr int BYTES = (SUMS_AT + (g - NEAR) * 32 * ROWS) * sizeof(real) + AHEAD * (SLOT * 4 + 4);
static_assert(BYTES == FORWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(32) forward(const Forward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    real* const h = weights + HELD;
    real* const m = h + SUMMED_0;
    real* const far = weights + SUMS_AT - (NEAR + 1) * 32 * ROWS;
    unsigned* const ring = reinterpret_cast<unsigned*>(weights + SUMS_AT + (g - NEAR) * 32 * ROWS);
    int* const odd = reinterpret_cast<int*>(ring + AHEAD * SLOT);
    const Sequence of(a.batch);
    const int lane = thread();

    hold(weights, a.packed);
    for (int i = lane; i < SUMMED_0 + GP; i += 32) h[i] = 0;
    barrier(32);
    real z[NEAR + 1][ROWS], own[ROWS];  // suffix sums, the value of m
    Quad U[NEAR][ROWS][MP / 4], Whm[ROWS][SUMMED_0 / 4];
    real Wxh[!PROJECTED && I ? I : 1];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        UNROLL for (int j = 0; j < NEAR; j++)
            UNROLL for (int q = 0; q < MP / 4; q++)
                U[j][r][q] = row.i < n(j) ? quads(a.packed + module_at(j))[q * n(j) + row.i] : Quad{};
        UNROLL for (int q = 0; q < SUMMED_0 / 4; q++)
            Whm[r][q] = row.of_module() ? summed_row(a.packed, row.k, row.o)[q * M] : Quad{};
        own[r] = row.of_module() ? a.m0[static_cast<int64>(of.b) * G + row.i - H] : real(0);
        if (row.of_module()) m[row.k * MP + row.o] = own[r];
        z[NEAR][r] = row.i < ALL ? bias(a.weights, row.i) : real(0);
        if (FAR) far[(g * ROWS + r) * 32 + lane] = z[NEAR][r];
    }
    if (!PROJECTED && I)
        UNROLL for (int k = 0; k < I; k++) Wxh[k] = lane < H ? a.weights.Wxh[lane * I + k] : real(0);

    Walk in(of, 0, 1);
    auto fetch_step = [&] {
        if (!WIDTH) return;
        const int slot = in.s & (AHEAD - 1);
        if (in.s < of.length) fetch<WIDTH>(ring + slot * SLOT, a.x + in.row * WIDTH, lane);
        if (sizeof(value) == 2 && lane == 0) odd[slot] = oddness(a.x + in.row * WIDTH);
        commit();
        in.go_on();
    };
    for (int s = 0; s < AHEAD - 1; s++) fetch_step();
    if (WIDTH) wait<AHEAD - 2>();
    barrier(32);

    // z_j = z_{j+1} + U_j m_j of the modules that fired
    auto send = [&](int s, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        UNROLL for (int r = 0; r < rows_of(known); r++) {
            const int i = r * 32 + lane;
            if (!known) {
                real sum = far[(most * ROWS + r) * 32 + lane];
                for (int j = most - 1; j >= NEAR; j--) {
                    real sums[4] = {};
                    if (i < n(j)) {
                        const Quad* const w = quads(weights + module_at(j)) + i;
                        UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, w[q * n(j)], quads(m + j * MP)[q]);
                    }
                    sum += total(sums);
                    if (j > NEAR) far[(j * ROWS + r) * 32 + lane] = sum;
                }
                z[NEAR][r] = sum;
            }
            UNROLL for (int j = (known ? known : NEAR) - 1; j >= 0; j--) {
                real sums[4] = {};
                if (j == 0 && r == 0 && WIDTH) {
                    const int slot = (s + 1) & (AHEAD - 1);
                    auto read = [&](int k) { return lane < H ? fetched(ring + slot * SLOT, odd + slot, k) : real(0); };
                    if (PROJECTED)
                        sums[0] = read(lane);
                    else
                        UNROLL for (int k = 0; k < I; k++) sums[k % 4] += Wxh[k] * read(k);
                }
                UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, U[j][r][q], quads(m + j * MP)[q]);
                z[j][r] = z[j + 1][r];
                if (i < n(j)) z[j][r] += total(sums);
            }
        }
    };
    send(-1, Number<LAST>{}, g);
    Walk out(of, 0, 1);
    of.each_step(
        [&](int s, auto KNOWN, int most) {
            constexpr int known = decltype(KNOWN)::value;
            if (lane < H) {  // h = tanh(Wxh x + z_0[h part])
                h[lane] = tanh_of(z[0][0]);
                if (a.hidden) put(a.hidden + out.row * H + lane, h[lane]);
            }
            if (WIDTH) wait<AHEAD - 3>();
            barrier(32);
            UNROLL for (int r = 0; r < rows_of(known); r++) {  // m_k = z_k[m_k part] + Whm[k] h
                const Row row(r);
                real sums[4] = {};
                UNROLL for (int q = 0; q < SUMMED_0 / 4; q++) add_product(sums, Whm[r][q], quads(h)[q]);
                if (row.of_modules(most)) m[row.k * MP + row.o] = own[r] = z[0][r] + total(sums);
            }
            barrier(32);
            fetch_step();
            send(s, KNOWN, most);
            UNROLL for (int r = 0; r < ROWS; r++)
                if (Row(r).of_module()) put(a.memory + out.row * G + Row(r).i - H, own[r]);
            out.go_on();
        },
        true);
    UNROLL for (int r = 0; r < ROWS; r++)
        if (Row(r).of_module()) a.last[static_cast<int64>(of.b) * G + Row(r).i - H] = own[r];
}

#else  // the backward pass

constexpr int SUMS_AT = HELD + summed_before(g) + GP;  // gz_j of the lanes' rows, j > NEAR
constexpr int BYTES = (SUMS_AT + (g - NEAR) * 32 * ROWS) * sizeof(real) + AHEAD * (SLOT * 4 + 8);
static_assert(BYTES == BACKWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(32) backward(const Backward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    real* const gz = weights + HELD;  // of module j from summed_before(j), when it fires
    real* const gm = gz + summed_before(g);
    real* const far = weights + SUMS_AT - (NEAR + 1) * 32 * ROWS;
    unsigned* const ring = reinterpret_cast<unsigned*>(weights + SUMS_AT + (g - NEAR) * 32 * ROWS);
    int* const odd = reinterpret_cast<int*>(ring + AHEAD * SLOT);
    const Sequence of(a.batch);
    const int lane = thread();

    hold(weights, a.packed);
    for (int i = lane; i < SUMS_AT - HELD + (g - NEAR) * 32 * ROWS; i += 32) gz[i] = 0;
    real first[ROWS] = {};            // gz_k of rows of module k; of the h part gz_0
    real passed[NEAR + 1][ROWS] = {};  // gz_j that came from faster modules; gz_g: the biases'
    real held_gm[ROWS] = {};          // gradients of outputs, since a module fired
    constexpr int COLUMN = summed(NEAR - 1) / 4;
    Quad U[ROWS][COLUMN], Whm[NEAR][MP / 4];  // U_k of the row's own module: a column; Whm[j]: the same
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        UNROLL for (int q = 0; q < COLUMN; q++)
            U[r][q] = row.of_modules(NEAR) && q < summed(row.k) / 4 ? summed_row(a.packed, row.k, row.o)[q * M] : Quad{};
        if (a.glast && row.of_module()) held_gm[r] = a.glast[static_cast<int64>(of.b) * G + row.i - H];
    }
    UNROLL for (int j = 0; j < NEAR; j++)
        UNROLL for (int q = 0; q < MP / 4; q++)
            Whm[j][q] = lane < H ? quads(a.packed + module_at(j))[q * H + lane] : Quad{};

    Walk in(of, of.length - 1, -1);
    auto fetch_step = [&] {
        const int slot = in.s & (AHEAD - 1);
        if (in.s >= 0) {
            const value *const one = a.gmemory + in.row * G, *const two = a.hidden + in.row * H;
            if (a.gmemory) fetch<G>(ring + slot * SLOT, one, lane);
            fetch<H>(ring + slot * SLOT + words(G), two, lane);
            if (sizeof(value) == 2 && lane == 0) odd[slot * 2] = oddness(one), odd[slot * 2 + 1] = oddness(two);
        }
        commit();
        in.go_on();
    };
    for (int i = 1; i < AHEAD; i++) fetch_step();
    wait<AHEAD - 2>();
    barrier(32);

    const int64 before = a.batch.before(of.b);
    // Of module j at step s, or of what its initial memory receives, s = -1
    auto index = [&](int j, int s) {
        const int64 fired = s < 0 ? 0 : ((of.clock + s + 1) >> j) - (of.clock >> j);
        return (before >> j) + 2 * of.b + fired;
    };
    auto record = [&](int j, int s) { return a.records + a.record_at[j] + index(j, s) * (n(j) + M); };
    Walk at(of, of.length - 1, -1);
    auto given = [&](int64 row) { return a.ghidden && lane < H ? real(widen(a.ghidden[row * H + lane])) : real(0); };
    real gh = given(at.row), next_gh = given(at.next);

    auto step = [&](int s, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        const int slot = s & (AHEAD - 1);
        UNROLL for (int r = 0; r < rows_of(known); r++) {  // gz_{j+1} += gz_j;  that of the modules that fire is complete
            const Row row(r);
            const bool passes = row.i < H + most * M;
            real sum = first[r];
            auto complete = [&](int j) {
                if (!passes || j < row.k) return;
                gz[summed_before(j) + place(row.i)] = sum;
                if (j && a.records) record(j, s)[row.i] = sum;
            };
            UNROLL for (int j = 0; j < (known ? known : NEAR); j++) {
                if (j) sum += passed[j][r], passed[j][r] = 0;
                complete(j);
            }
            if (!known) {
                sum += passed[NEAR][r], passed[NEAR][r] = 0;
                complete(NEAR);
                for (int j = NEAR + 1; j < most; j++) {
                    sum += far[(j * ROWS + r) * 32 + lane], far[(j * ROWS + r) * 32 + lane] = 0;
                    complete(j);
                }
                if (passes) far[(most * ROWS + r) * 32 + lane] += sum;
            } else if (passes) {
                passed[known][r] += sum;
            }
        }
        if (known != 1 && a.records && lane == 0)
            for (int j = 1; j < most; j++)
                a.record_of[a.record_of_at[j] + index(j, s)] = s < 0 ? ~of.b : static_cast<int>(at.row);
        if (a.gmemory && s >= 0)
            UNROLL for (int r = 0; r < ROWS; r++)
                if (Row(r).of_module()) held_gm[r] += fetched(ring + slot * SLOT, odd + slot * 2, Row(r).i - H);
        wait<AHEAD - 3>();
        barrier(32);
        UNROLL for (int r = 0; r < rows_of(known); r++) {  // gm_k += U_k^T gz_k
            const Row row(r);
            const bool fires = row.of_modules(most);
            const Quad* const v = quads(gz + summed_before(fires ? row.k : 0));
            real sums[4] = {held_gm[r]};
            if (known) {  // weights behind the end of a column are 0
                UNROLL for (int q = 0; q < summed(known ? known - 1 : 0) / 4; q++) add_product(sums, U[r][q], v[q]);
            } else if (fires) {
                const Quad* const w = summed_row(weights, row.k, row.o);
                for (int q = 0; q < summed(row.k) / 4; q++) add_product(sums, w[q * M], v[q]);
            }
            if (fires) {
                first[r] = gm[row.k * MP + row.o] = total(sums);
                held_gm[r] = 0;
                if (row.k && a.records) record(row.k, s)[n(row.k) + row.o] = s < 0 ? real(0) : first[r];
            }
        }
        if (known == LAST && s < 0) return;
        barrier(32);
        fetch_step();
        real sums[4] = {gh};  // ga = (sum_k Whm[k]^T gm_k) (1 - h^2)
        UNROLL for (int k = 0; k < (known ? known : NEAR); k++)
            UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, Whm[k][q], quads(gm + k * MP)[q]);
        if (!known && lane < H)
            for (int k = NEAR; k < most; k++)
                UNROLL for (int q = 0; q < MP / 4; q++)
                    add_product(sums, quads(weights + module_at(k))[q * H + lane], quads(gm + k * MP)[q]);
        if (lane < H) {
            const real h = fetched(ring + slot * SLOT + words(G), odd + slot * 2 + 1, lane);
            first[0] = total(sums) * (1 - h * h);
        }
        if (a.left)
            UNROLL for (int r = 0; r < rows_of(1); r++)
                if (Row(r).i < H + M) put(a.left + at.row * (H + M) + Row(r).i, first[r]);
        if (a.left_of && lane == 0) a.left_of[at.row] = s ? static_cast<int>(at.next) : ~of.b;
        at.go_on();
        gh = next_gh, next_gh = given(at.next);
    };
    of.each_step(step, false);
    step(-1, Number<LAST>{}, g);  // what the initial memories receive
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        if (row.of_module()) a.gm0[static_cast<int64>(of.b) * G + row.i - H] = first[r];
        if (row.i < ALL)
            a.gbias[static_cast<int64>(of.b) * ALL + row.i] = FAR ? far[(g * ROWS + r) * 32 + lane] : passed[NEAR][r];
    }
    for (int j = 1; j < (a.records ? g : 0); j++)
        for (int64 i = index(j, of.length - 1) + 1 + lane; i < a.batch.record(j, of.b + 1); i += 32)
            a.record_of[a.record_of_at[j] + i] = NONE;
}

#endif

#endif
