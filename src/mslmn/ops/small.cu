
// The two passes for small networks (SMALL), after the text of cuda.cu, whose equations, layouts and results are these.
//
// There a step of a small network is nearly all barriers of a block, loops that hardly begin and branches. Here one warp
// takes a sequence through time and does all of it. Row i of U_j, so z_j[i] or gz_j[i], and the value of m that a row of a
// module stands for, are lane i % 32's for every j, in its registers: adding up suffix sums needs nobody else. What
// lanes exchange, twice a step, goes through shared memory,
//
//     forward    h = tanh(Wxh x + z_0)      ->     m_k = z_k + Whm[k] h             ->     z_j = z_{j+1} + U_j m_j
//     backward   gz_{j+1} += gz_j           ->     gm_k = gm_k + U_k^T gz_k         ->     ga = Whm^T gm (1 - h^2)
//
// because four values are read back in little more time than a shuffle takes for one; between the lanes of a warp that
// needs no barrier but __syncwarp. Stores to device memory wait for nothing, inputs are copied to shared memory AHEAD steps
// early. Weights of the NEAR fastest modules and their suffix sums are registers; the others' stay in shared memory, for
// one step of 2^NEAR.
//
// A branch costs as much as ten sums. So lanes that have nothing to do compute with weights that are 0 and store what
// they have where nobody reads it. (Zero times infinity: where a memory overflows, slower ones are lost with it.)

#ifdef SMALL

constexpr int ROWS = (ALL + 31) / 32;      // that a lane has
constexpr int NEAR = smaller(g, SPECIAL);  // a step at which more modules fire is Number<0>
constexpr bool FAR = NEAR < g;
constexpr int HELD = FAR ? PACKED : 0;     // packed weights in shared memory
constexpr int LAST = FAR ? 0 : g;          // the number of a step at which all modules fire
static_assert(H > 0 && H <= 32 && g <= 32 && LANES == 1, "ops/cuda.py chooses otherwise");

constexpr int rows_of(int known) { return (H + (known ? known : g) * M + 31) / 32; }  // the most that a lane has of U_j

// Row i of U_{g-1}: of which module it is, and which value of it; of the h part: k = -1.
struct Row {
    int i, k, o;
    INLINE explicit Row(int r) : i(r * 32 + thread()), k(i < H ? -1 : (i - H) / M), o(i < H ? 0 : (i - H) % M) {}
    INLINE bool of_memory() const { return i >= H && i < ALL; }
    INLINE int memory() const { return i < H ? 0 : smaller(i - H, G - 1); }  // of a row of no module: another's
};

// The rows of a sequence in a batch, in the order of its steps or, `back`, in reverse, without a branch: they are looked up
// three steps early, at the end of a step, so that nothing waits for it, also where there is nothing to look up.
struct Lines {
    const int64* start;
    int p = -2, last, ahead, first, pitch, step, mask, line = 0, next = 0, found;

    INLINE Lines(const Sequence& of, bool back) : last(of.length - 1) {
        const Batch& batch = of.batch;
        const bool down = back != (batch.reverse != 0);
        const int t = down ? last : 0, sign = down ? -1 : 1;
        start = batch.packing ? batch.packing + t : batch.clock;
        step = batch.packing ? sign : 0, mask = batch.packing ? -1 : 0;
        first = batch.packing ? of.b : t * batch.B + of.b, pitch = batch.packing ? 0 : sign * batch.B;
        look_up();
        for (int i = 0; i < 2; i++) go_on();
    }
    INLINE void look_up() {
        ahead = smaller(p + 2, last);
        found = static_cast<int>(start[ahead * step]);
    }
    INLINE void go_on() {
        line = next, next = first + ahead * pitch + (found & mask), p++;
        look_up();
    }
};

// One value on its way to shared memory, and what has arrived there; of 16 bits, the word of four bytes that it is in.
constexpr int WORDS = (sizeof(value) + 3) / 4;
INLINE void fetch_one(unsigned* slot, const value* from) {
    const unsigned* const word = reinterpret_cast<const unsigned*>(from - oddness(from));
    UNROLL for (int i = 0; i < WORDS; i++) copy_async(slot + i, word + i);
}
INLINE real fetched_one(const unsigned* slot, const value* from) {
    return widen(reinterpret_cast<const value*>(slot)[sizeof(value) == 2 ? oddness(from) : 0]);
}

INLINE const Quad* summed_row(const real* packed, int k, int o) {  // row o of what is summed over for module k
    return quads(packed + module_at(k) + owned(k) * MP) + o;
}

#ifdef FORWARD

constexpr int READ = WIDTH ? (PROJECTED ? 32 : I) * WORDS : 0;  // words of a step: one lane's each, or all lanes read them
// A network with one or two values of h has no exchange for them: every lane computes them, from rows that it has beside
// its own.
constexpr int EACH = H * MP <= 8 ? H : 0;
constexpr int SETS = ROWS + EACH, HS = larger(EACH, 1);  // rows that a lane has, and of them of the h part
INLINE int row_of(int r) { return r < ROWS ? r * 32 + thread() : r - ROWS; }
INLINE int h_of(int e) { return EACH ? e : thread(); }
INLINE int set_of_h(int e) { return EACH ? ROWS + e : 0; }

constexpr int H_AT = HELD, M_AT = H_AT + SUMMED_0, NOWHERE = M_AT + GP, FAR_AT = NOWHERE + 4;
constexpr int RING_AT = FAR_AT + (g - NEAR) * 32 * SETS;
static_assert(RING_AT * sizeof(real) + AHEAD * READ * 4 == FORWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(32) forward(const Forward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    const int zero = opaque(0);
    real* const h = weights + H_AT + zero;
    real* const m = weights + M_AT + zero;
    real* const nowhere = weights + NOWHERE;
    real* const far = weights + FAR_AT - (NEAR + 1) * 32 * SETS;  // z_j of the lanes' rows, j > NEAR; z_g: the biases
    unsigned* const ring = reinterpret_cast<unsigned*>(weights + RING_AT);
    const Sequence of(a.batch);
    const int lane = thread();

    for (int e = lane; e < HELD / 4; e += 32) reinterpret_cast<Quad*>(weights)[e] = quads(a.packed)[e];
    for (int i = lane; i < NOWHERE - H_AT; i += 32) h[i] = 0;
    barrier(32);
    real z[NEAR + 1][SETS] = {}, own[ROWS];  // suffix sums of the lane's rows, its values of h and m
    real* to[ROWS];                          // where m is in shared memory,
    value* result[ROWS];                     // and where the results of the first row of the batch are to be
    Quad U[NEAR][SETS][MP / 4], Whm[ROWS][SUMMED_0 / 4];
    real Wxh[HS][!PROJECTED && I ? I : 1];
    UNROLL for (int r = 0; r < SETS; r++) {
        const int i = row_of(r);
        UNROLL for (int j = 0; j < NEAR; j++)
            UNROLL for (int q = 0; q < MP / 4; q++)
                U[j][r][q] = i < n(j) ? quads(a.packed + module_at(j))[q * n(j) + i] : Quad{};
        z[NEAR][r] = i < ALL ? bias(a.weights, i) : real(0);
        if (FAR) far[(g * SETS + r) * 32 + lane] = z[NEAR][r];
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        UNROLL for (int q = 0; q < SUMMED_0 / 4; q++)
            Whm[r][q] = row.of_memory() ? summed_row(a.packed, row.k, row.o)[q * M] : Quad{};
        own[r] = row.of_memory() ? a.m0[static_cast<int64>(of.b) * G + row.i - H] : real(0);
        to[r] = row.of_memory() ? m + row.k * MP + row.o : nowhere;
        *to[r] = own[r];
        result[r] = opaque(row.i < H ? a.hidden + row.i : a.memory + row.i - H);
    }
    if (!PROJECTED && I)
        UNROLL for (int e = 0; e < HS; e++)
            UNROLL for (int k = 0; k < I; k++) Wxh[e][k] = h_of(e) < H ? a.weights.Wxh[h_of(e) * I + k] : real(0);
    real* const to_h = weights + opaque(lane < H ? H_AT + lane : NOWHERE);
    const int pitch = opaque(lane < H ? H : G);
    const int keeps = opaque(lane < ALL && (lane >= H || a.hidden));

    Lines in(of, false), at(of, false);
    const value* const x = opaque(a.x + (WIDTH ? smaller(lane, WIDTH - 1) : 0));
    auto fetch_step = [&] {
        if (!WIDTH) return;
        fetch_one(ring + (in.p & (AHEAD - 1)) * READ + smaller(lane, READ / WORDS - 1) * WORDS,
                  advanced(x, in.line, WIDTH));
        commit();
        in.go_on();
    };
    for (int s = 0; s < AHEAD - 1; s++) fetch_step();
    if (WIDTH) wait<AHEAD - 2>();
    barrier(32);

    // z_j = z_{j+1} + U_j m_j of the modules that fired; then Wxh x, of the step whose row is `line`
    auto send = [&](int s, int line, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        UNROLL for (int r = 0; r < SETS; r++) {
            if (r >= rows_of(known) && r < ROWS) continue;
            const int i = row_of(r);
            real sum = z[known ? known : NEAR][r];
            if (!known) {
                sum = far[(most * SETS + r) * 32 + lane];
                for (int j = most - 1; j >= NEAR; j--) {
                    real sums[4] = {};
                    const Quad* const w = quads(weights + module_at(j)) + i;
                    if (i < n(j))
                        UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, w[q * n(j)], quads(m + j * MP)[q]);
                    sum += total(sums);
                    if (j > NEAR) far[(j * SETS + r) * 32 + lane] = sum;
                }
                z[NEAR][r] = sum;
            }
            UNROLL for (int j = (known ? known : NEAR) - 1; j >= 0; j--) {
                real sums[4] = {};
                UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, U[j][r][q], quads(m + j * MP)[q]);
                z[j][r] = sum += total(sums);
            }
        }
        if (WIDTH) {
            const unsigned* const slot = ring + (s & (AHEAD - 1)) * READ;
            const value* const x = a.x + static_cast<int64>(line) * WIDTH;
            auto read = [&](int k, int e) { return h_of(e) < H ? fetched_one(slot + k * WORDS, x + k) : real(0); };
            UNROLL for (int e = 0; e < HS; e++) {
                real sums[4] = {};
                if (PROJECTED)
                    sums[0] = read(h_of(e), e);
                else
                    UNROLL for (int k = 0; k < I; k++) sums[k % 4] += Wxh[e][k] * read(k, e);
                z[0][set_of_h(e)] += total(sums);
            }
        }
    };
    send(0, at.line, Number<LAST>{}, g);
    of.each_step(
        [&](int s, auto KNOWN, int most) {
            constexpr int known = decltype(KNOWN)::value;
            real v[HS];  // h = tanh(Wxh x + z_0[h part])
            UNROLL for (int e = 0; e < HS; e++) v[e] = tanh_of(z[0][set_of_h(e)]);
            if (!EACH) *to_h = v[0];
            if (WIDTH) wait<AHEAD - 3>();
            barrier(32);
            UNROLL for (int r = 0; r < rows_of(known); r++) {  // m_k = z_k[m_k part] + Whm[k] h
                const int i = r * 32 + lane;
                real sums[4] = {};
                if (EACH)
                    UNROLL for (int e = 0; e < HS; e++) sums[e] = Whm[r][0].v[e] * v[e];
                else
                    UNROLL for (int q = 0; q < SUMMED_0 / 4; q++) add_product(sums, Whm[r][q], quads(h)[q]);
                const real sum = z[0][r] + total(sums);
                *to[r] = own[r] = i < H + most * M ? sum : own[r];
                if (r == 0)
                    UNROLL for (int e = 0; e < HS; e++) own[0] = (EACH ? lane == e : lane < H) ? v[e] : own[0];
            }
            barrier(32);
            send(s + 1, at.next, KNOWN, most);
            fetch_step();
            if (keeps) put(advanced(result[0], at.line, pitch), own[0]);
            UNROLL for (int r = 1; r < ROWS; r++)
                if (r * 32 + lane < ALL) put(advanced(result[r], at.line, G), own[r]);
            at.go_on();
        },
        true);
    UNROLL for (int r = 0; r < ROWS; r++)
        if (Row(r).of_memory()) a.last[static_cast<int64>(of.b) * G + Row(r).i - H] = own[r];
}

#else  // the backward pass

constexpr int GZ = summed(g - 1) + 4;  // of gz_j, for every j: a row of slower modules is there too, for nobody
constexpr int READ = (ROWS + 1) * 32 * WORDS;  // words of a step: every lane has its own
constexpr int GM_AT = HELD + g * GZ, NOWHERE = GM_AT + GP, FAR_AT = NOWHERE + 4;
constexpr int RING_AT = FAR_AT + (g - NEAR) * 32 * ROWS;
static_assert(RING_AT * sizeof(real) + AHEAD * READ * 4 == BACKWARD_BYTES, "ops/cuda.py counts otherwise");

KERNEL(32) backward(const Backward a) {
    real* const weights = reinterpret_cast<real*>(shared_memory());
    real* const gz = weights + HELD;
    real* const gm = weights + GM_AT + opaque(0);
    real* const nowhere = weights + NOWHERE;
    real* const far = weights + FAR_AT - (NEAR + 1) * 32 * ROWS;  // `passed` of j > NEAR
    const Sequence of(a.batch);
    const int lane = thread();

    for (int e = lane; e < HELD / 4; e += 32) reinterpret_cast<Quad*>(weights)[e] = quads(a.packed)[e];
    for (int i = lane; i < RING_AT - HELD; i += 32) gz[i] = 0;
    barrier(32);
    real first[ROWS] = {};             // gz_k of a row of module k; gz_0 of one of the h part
    real passed[NEAR + 1][ROWS] = {};  // gz_j, as faster modules passed it on; gz_g: the biases'
    real held_gm[ROWS] = {};           // gradients of outputs, since a module fired
    constexpr int COLUMN = summed(NEAR - 1) / 4;
    Quad U[ROWS][COLUMN], Whm[NEAR][MP / 4];  // a column of U_k, k the row's own module, and one of each Whm
    real *to_gz[ROWS], *to_gm[ROWS];
    const Quad* from_gz[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        const bool near = row.of_memory() && row.k < NEAR;
        UNROLL for (int q = 0; q < COLUMN; q++)
            U[r][q] = near && q < summed(row.k) / 4 ? summed_row(a.packed, row.k, row.o)[q * M] : Quad{};
        if (a.glast && row.of_memory()) held_gm[r] = a.glast[static_cast<int64>(of.b) * G + row.i - H];
        to_gz[r] = gz + (row.i < ALL ? place(row.i) : GZ - 4);
        to_gm[r] = row.of_memory() ? gm + row.k * MP + row.o : nowhere;
        from_gz[r] = quads(gz + (row.of_memory() ? row.k : 0) * GZ);
    }
    UNROLL for (int j = 0; j < NEAR; j++)
        UNROLL for (int q = 0; q < MP / 4; q++)
            Whm[j][q] = lane < H ? quads(a.packed + module_at(j))[q * H + lane] : Quad{};

    // What a step reads: of a row of the h part h and its gradient, of any other the gradient of the output
    unsigned* const ring = reinterpret_cast<unsigned*>(weights + RING_AT) + lane * WORDS;
    auto slot = [&](int p, int part) { return ring + ((p & (AHEAD - 1)) * (ROWS + 1) + part) * 32 * WORDS; };
    const int pitch = opaque(lane < H ? H : G), adds_h = opaque(lane < H && a.ghidden);
    const value *seen[ROWS], *const ghidden = opaque((a.ghidden ? a.ghidden : a.hidden) + smaller(lane, H - 1));
    int adds[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        adds[r] = opaque(a.gmemory && row.of_memory());
        seen[r] = opaque(row.i < H ? a.hidden + row.i : (a.gmemory ? a.gmemory : a.memory) + row.memory());
    }
    auto seen_at = [&](int r, int line) { return advanced(seen[r], line, r ? G : pitch); };
    auto ghidden_at = [&](int line) { return advanced(ghidden, line, H); };
    Lines in(of, true), at(of, true);
    auto fetch_step = [&] {
        UNROLL for (int r = 0; r < ROWS; r++) fetch_one(slot(in.p, r), seen_at(r, in.line));
        fetch_one(slot(in.p, ROWS), ghidden_at(in.line));
        commit();
        in.go_on();
    };
    for (int i = 1; i < AHEAD; i++) fetch_step();

    // Records, from the last to the first, which an initial memory receives: of module j where `complete` are those that are
    // written next; of a row's own module, its gm; of module `lane`, its step.
    const int64 before = a.batch.before(of.b);
    auto index = [&](int j, int s) {  // of module j at step s, s = -1: of its initial memory
        return (before >> j) + 2 * of.b + (s < 0 ? 0 : ((of.clock + s + 1) >> j) - (of.clock >> j));
    };
    auto record = [&](int j, int s) { return a.records + a.record_at[j] + index(j, s) * (n(j) + M); };
    real *complete[NEAR], *own_gm[ROWS];
    int gm_pitch[ROWS];
    UNROLL for (int j = 1; j < NEAR; j++) complete[j] = opaque(record(j, of.length - 1) + lane);
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        const bool keeps_gm = a.records && row.of_memory() && row.k > 0;
        gm_pitch[r] = opaque(keeps_gm ? n(row.k) + M : 0);
        own_gm[r] = opaque(keeps_gm ? record(row.k, of.length - 1) + n(row.k) + row.o : nullptr);
    }
    const int mine = a.records && lane > 0 && lane < g ? lane : g;  // g never fires
    int* record_of = opaque(mine < g ? a.record_of + a.record_of_at[mine] + index(mine, of.length - 1) : nullptr);
    value* const left = opaque(a.left + lane);
    int* const left_of = opaque(a.left_of);
    const int keeps = opaque(a.records ? lane : ALL), keeps_left = opaque(a.left ? lane : ALL);  // < ALL: something
    const int keeps_left_of = opaque(a.left_of && lane == 0);

    auto step = [&](int s, auto KNOWN, int most) {
        constexpr int known = decltype(KNOWN)::value;
        constexpr bool slowest = known == LAST;  // it may be what the initial memories receive, s = -1
        const bool initial = slowest && s < 0;
        UNROLL for (int r = 0; r < rows_of(known); r++) {  // gz_{j+1} += gz_j;  gz_j of the modules that fire is complete
            const Row row(r);
            real sum = first[r];
            UNROLL for (int j = 0; j < (known ? known : NEAR); j++) {
                if (j) {
                    sum += passed[j][r], passed[j][r] = 0;
                    if (r * 32 + keeps < n(j)) complete[j][r * 32] = sum;
                }
                to_gz[r][j * GZ] = sum;
            }
            if (!known) {
                sum += passed[NEAR][r], passed[NEAR][r] = 0;
                for (int j = NEAR; j < most; j++) {
                    if (j > NEAR) sum += far[(j * ROWS + r) * 32 + lane], far[(j * ROWS + r) * 32 + lane] = 0;
                    if (r * 32 + keeps < n(j)) record(j, s)[row.i] = sum;
                    to_gz[r][j * GZ] = sum;
                }
                far[(most * ROWS + r) * 32 + lane] += row.i < H + most * M ? sum : real(0);
            } else {
                passed[known][r] += row.i < H + most * M ? sum : real(0);
            }
        }
        UNROLL for (int j = 1; j < (known ? known : NEAR); j++) complete[j] -= n(j) + M;
        if (known != 1 && mine < most) *record_of-- = initial ? ~of.b : at.line;
        wait<AHEAD - 2>();
        real read[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            read[r] = fetched_one(slot(at.p, r), seen_at(r, at.line));
            held_gm[r] += adds[r] && !initial ? read[r] : real(0);
        }
        const real gh = fetched_one(slot(at.p, ROWS), ghidden_at(at.line));
        barrier(32);
        UNROLL for (int r = 0; r < rows_of(known); r++) {  // gm_k += U_k^T gz_k
            const Row row(r);
            const bool fires = row.i >= H && row.i < H + most * M;
            real sums[4] = {held_gm[r]};
            if (known)
                UNROLL for (int q = 0; q < summed(known ? known - 1 : 0) / 4; q++)
                    add_product(sums, U[r][q], from_gz[r][q]);
            else if (fires)
                for (int q = 0; q < summed(row.k) / 4; q++)
                    add_product(sums, summed_row(weights, row.k, row.o)[q * M], from_gz[r][q]);
            first[r] = fires ? total(sums) : first[r];
            held_gm[r] = fires ? real(0) : held_gm[r];
            *to_gm[r] = first[r];
            if (known != 1 && gm_pitch[r] && fires) *own_gm[r] = initial ? real(0) : first[r];
            if (known != 1) own_gm[r] -= fires ? gm_pitch[r] : 0;
        }
        if (initial) return;
        barrier(32);
        real sums[4] = {};  // ga = (sum_k Whm[k]^T gm_k) (1 - h^2)
        UNROLL for (int k = 0; k < (known ? known : NEAR); k++)
            UNROLL for (int q = 0; q < MP / 4; q++) add_product(sums, Whm[k][q], quads(gm + k * MP)[q]);
        if (!known && lane < H)
            for (int k = NEAR; k < most; k++)
                UNROLL for (int q = 0; q < MP / 4; q++)
                    add_product(sums, quads(weights + module_at(k))[q * H + lane], quads(gm + k * MP)[q]);
        fetch_step();
        sums[0] += adds_h ? gh : real(0);
        const real h = read[0], ga = total(sums) * (1 - h * h);
        first[0] = lane < H ? ga : first[0];
        UNROLL for (int r = 0; r < rows_of(1); r++)
            if (r * 32 + keeps_left < H + M) put(advanced(left, at.line, H + M) + r * 32, first[r]);
        if (keeps_left_of) *advanced(left_of, at.line, 1) = s ? at.next : ~of.b;
        at.go_on();
    };
    of.each_step(step, false);
    step(-1, Number<LAST>{}, g);  // what the initial memories receive
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Row row(r);
        if (row.of_memory()) a.gm0[static_cast<int64>(of.b) * G + row.i - H] = first[r];
        if (row.i < ALL)
            a.gbias[static_cast<int64>(of.b) * ALL + row.i] = FAR ? far[(g * ROWS + r) * 32 + lane] : passed[NEAR][r];
    }
    for (int j = 1; j < (a.records ? g : 0); j++)
        for (int64 i = index(j, of.length - 1) + 1 + lane; i < a.batch.record(j, of.b + 1); i += 32)
            a.record_of[a.record_of_at[j] + i] = NONE;
}

#endif

#endif
