// Expert feed-forward over ragged rows for AVX-512, forward and backward: one call each, experts over threads.
//
// Weights are read where they are, once a pass: they are the broadcast operand of every product. Rows of x and dy are
// packed with 16 of them in a vector, so an expert with one row costs one multiply-add per weight and runs at the rate
// of memory; with many rows the same loops run at the rate of the multipliers. All operands are 32-bit units: a float,
// or a pair of bfloat16 along the contraction (vdpbf16ps). Sums are float32 in the order of the contraction, whatever
// the threads, the other rows and who ran first: a row's result does not depend on its neighbours.
//
// Backward has two phases: rows (dhidden, dpre, dx; an item of work is up to 144 rows of one expert) and weights (an
// item is 256 rows of one expert's gradient, written once, past the caches when it is larger than they are).
//
// Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

struct Args {  // as FIELDS in cpu_ffn.py
    int64_t bf16, threads, N, K, R, E, D, F, stream;
    int64_t x, gate, gate_up, down, offset, row, slot, pre, y, rows_y;  // K = 0: no gates, a row of x has one expert
    int64_t dy, dgate, dx, rows_dx, hidden, dpre;                       // rows_y, rows_dx: [R, D], not yet added up
    int64_t d_up, up_wide, up_add, d_down, down_wide, down_add;         // wide: float32; add: to what is there
};

typedef uint32_t u32;
typedef uint16_t bf16;
static const int64_t PANEL = 48, PANELS = 3, BLOCK = 64, HEIGHT = 256, DEPTH = 320, WHOLE = INT64_MAX;

template <class T> static T* scratch(int i, int64_t count) {  // of one thread, kept between calls
    static thread_local std::vector<char> parts[5];
    const size_t bytes = count * sizeof(T) + 64;
    if (parts[i].size() < bytes) std::vector<char>(bytes).swap(parts[i]);
    return (T*)(((uintptr_t)parts[i].data() + 63) & ~(uintptr_t)63);
}
template <class T> static T* at(int64_t address) { return (T*)address; }
static inline __mmask16 lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// ------------------------------------------------------------------ 16 numbers: in memory, as float32, as units
static inline __m512i shift(__m512i v) { return _mm512_slli_epi32(v, 16); }
static inline __m512i bits(const float* p, __mmask16 m) { return _mm512_maskz_loadu_epi32(m, p); }
static inline __m512i bits(const bf16* p, __mmask16 m) { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)); }
static inline __m512 load(const float* p, __mmask16 m) { return _mm512_castsi512_ps(bits(p, m)); }
static inline __m512 load(const bf16* p, __mmask16 m) { return _mm512_castsi512_ps(shift(bits(p, m))); }
static inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
static inline void store(float* p, __mmask16 m, __m512 v) { _mm512_mask_storeu_ps(p, m, v); }
static inline void store(bf16* p, __mmask16 m, __m512 v) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }
static inline __m512i unit(const float*, __m512 a, __m512) { return _mm512_castps_si512(a); }
static inline __m512i unit(const bf16*, __m512 a, __m512 b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(a)), shift(_mm512_cvtepu16_epi32(narrow(b))));
}
static inline __m512 mac(const float*, __m512 s, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), s);
}
static inline __m512 mac(const bf16*, __m512 s, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
}
static inline __m512 sigmoid(__m512 x) {  // 1 / (1 + exp(-x)); exp by 2^n times Taylor to r^7, |r| < 0.35; NaN stays
    x = _mm512_min_ps(_mm512_set1_ps(88), _mm512_max_ps(_mm512_set1_ps(-88), -x));
    const __m512 n = _mm512_roundscale_ps(x * 1.44269504f, 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x), p = _mm512_set1_ps(1 / 5040.f);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    for (float c : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, .5f, 1.f, 1.f}) p = p * r + c;
    return 1.f / (1.f + _mm512_scalef_ps(p, n));
}

// ------------------------------------------------------------------ packing
static inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88), t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    std::copy(t, t + 16, r);
}

// panel [units, width lanes] from n rows of units; lanes past n are zero
static void to_lanes(u32* const* row, int n, int64_t units, int width, u32* panel) {
    __m512i r[16];
    for (int l = 0; l < width; l += 16)
        for (int64_t k = 0; k < units; k += 16) {
            for (int i = 0; i < 16; i++)
                r[i] = l + i < n ? _mm512_maskz_loadu_epi32(lanes(units - k), row[l + i] + k) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < 16 && k + i < units; i++) _mm512_store_si512(panel + (k + i) * width + l, r[i]);
        }
}
// and back
static void to_rows(const u32* panel, int64_t units, int width, int n, u32* const* row) {
    __m512i r[16];
    for (int l = 0; l < n; l += 16)
        for (int64_t k = 0; k < units; k += 16) {
            for (int i = 0; i < 16; i++)
                r[i] = k + i < units ? _mm512_load_si512(panel + (k + i) * width + l) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < 16 && l + i < n; i++) _mm512_mask_storeu_epi32(row[l + i] + k, lanes(units - k), r[i]);
        }
}
// out [units, width]: columns [column, column + width) of n rows, paired along the rows; zero past `columns`
template <class T>
static void stack(const T* const* row, int64_t n, int64_t column, int64_t columns, int width, u32* out) {
    for (int64_t k = 0; k < n; k += 4 / sizeof(T))
        for (int64_t c = column; c < column + width; c += 16, out += 16) {
            __m512i v = bits(row[k] + c, lanes(columns - c));
            if (sizeof(T) == 2 && k + 1 < n) v = _mm512_or_si512(v, shift(bits(row[k + 1] + c, lanes(columns - c))));
            _mm512_store_si512(out, v);
        }
}

// ------------------------------------------------------------------ products
// c[8][16 * NV] (+)= a [8, units] @ b [units, 16 * NV]; a is stacked 16 wide, or is eight rows; every second unit
// fetches a line of what comes next
template <class T, int NV, bool STACKED>
static void tile(int64_t units, const u32* a, const u32* const* row, const u32* b, float* c, bool add, const char* next,
                 int64_t stride) {
    __m512 s[8][NV];
    for (int i = 0; i < 8 * NV; i++) s[i / NV][i % NV] = add ? _mm512_load_ps(c + i * 16) : _mm512_setzero_ps();
    auto step = [&](int64_t k) __attribute__((always_inline)) {
        __m512i w[NV];
        for (int v = 0; v < NV; v++) w[v] = _mm512_load_si512(b + (k * NV + v) * 16);
#pragma GCC unroll 8
        for (int m = 0; m < 8; m++) {
            const __m512i f = _mm512_set1_epi32(STACKED ? a[k * 16 + m] : row[m][k]);
            for (int v = 0; v < NV; v++) s[m][v] = mac((const T*)0, s[m][v], f, w[v]);
        }
    };
    for (int64_t k = 0; k + 2 <= units; k += 2, next += stride) _mm_prefetch(next, _MM_HINT_T0), step(k), step(k + 1);
    if (units % 2) step(units - 1);
    for (int i = 0; i < 8 * NV; i++) _mm512_store_ps(c + i * 16, s[i / NV][i % NV]);
}
template <class T, bool STACKED>
static void product(int nv, int64_t units, const u32* a, const u32* const* row, const u32* b, float* c, bool add,
                    const void* next, int64_t stride) {
    auto form = nv == 1 ? tile<T, 1, STACKED> : nv == 2 ? tile<T, 2, STACKED> : tile<T, 3, STACKED>;
    form(units, a, row, b, c, add, (const char*)next, stride);
}

// ------------------------------------------------------------------ one expert's rows, 48 to a panel
struct Chunk { int64_t expert, row, rows; };

template <class T> struct Rows {
    static const int64_t PER = 4 / sizeof(T);
    const Args& a;
    const Chunk& chunk;
    const int64_t D = a.D, F = a.F, panels = (chunk.rows + PANEL - 1) / PANEL, wide = PANEL * ((2 * F + 15) / PER);
    const int64_t *row = at<int64_t>(a.row) + chunk.row, *slot = at<int64_t>(a.slot) + chunk.row;
    const T *up = at<T>(a.gate_up) + chunk.expert * 2 * F * D, *down = at<T>(a.down) + chunk.expert * D * F;
    u32 *outer = scratch<u32>(0, panels * PANEL * D / PER);     // x or dy
    u32 *hidden = scratch<u32>(1, 2 * panels * wide), *dpre = hidden + panels * wide;
    float* c = scratch<float>(2, BLOCK * PANEL);

    int n(int64_t p) const { return std::min(PANEL, chunk.rows - p * PANEL); }
    int width(int64_t p) const { return (n(p) + 15) / 16 * 16; }
    u32* outside(int64_t p) const { return outer + p * PANEL * D / PER; }
    T* pre(int64_t p) const { return at<T>(a.pre) + (chunk.row + p * PANEL) * 2 * F; }  // [2F, n]
    __m512 gate(int64_t p, int l) const {
        alignas(64) float g[16];
        for (int i = 0; i < 16; i++) g[i] = l + i >= n(p) ? 0 : a.K ? at<float>(a.gate)[slot[p * PANEL + l + i]] : 1;
        return _mm512_load_ps(g);
    }
    void gather(int64_t from) {
        u32* source[PANEL];
        for (int64_t p = 0; p < panels; p++) {
            for (int l = 0; l < n(p); l++) source[l] = (u32*)(at<T>(from) + row[p * PANEL + l] * D);
            to_lanes(source, n(p), D / PER, width(p), outside(p));
        }
    }
    // c [columns, lanes] to columns [column, ...) of rows that are added up later, or of where these came from
    void scatter(int64_t column, int64_t columns, int64_t p, int64_t rows, int64_t whole) {
        alignas(64) u32 units[BLOCK * PANEL], *target[PANEL];
        for (int64_t d = 0; d < columns; d += PER)
            for (int l = 0; l < width(p); l += 16) {
                const __m512 *even = (__m512*)(c + d * width(p) + l), *odd = even + (PER - 1) * width(p) / 16;
                _mm512_store_si512(units + d / PER * width(p) + l, unit((T*)0, *even, *odd));
            }
        for (int64_t l = 0, r = p * PANEL; l < n(p); l++, r++)
            target[l] = (u32*)((a.K ? at<T>(rows) + (chunk.row + r) * D : at<T>(whole) + row[r] * D) + column);
        to_rows(units, columns / PER, width(p), n(p), target);
    }
    // eight rows of w [all, depth] from m on, times a panel; a row past the last is the last; fetches row m + ahead
    void direct(const T* w, int64_t m, int64_t all, int64_t depth, int64_t ahead, const u32* b, int64_t p, float* to) {
        const u32* rows[8];
        for (int i = 0; i < 8; i++) rows[i] = (u32*)(w + std::min(m + i, all - 1) * depth);
        const void* next = p ? (void*)b : (void*)(w + (m + ahead) * depth);
        product<T, false>(width(p) / 16, depth / PER, 0, rows, b, to, false, next, p ? 0 : 64);
    }
    // c [64, lanes] = columns [column, ...) of w [depth, all], transposed, times a panel; fetches the next columns
    void transposed(const T* w, int64_t depth, int64_t all, int64_t column, u32* stacked, const u32* b, int64_t p) {
        const int64_t units = depth / PER, lines = 4 / PER;
        for (int64_t t = 0; t < std::min(BLOCK, all - column + 7) / 8; t++) {
            const T* next = w + t / lines * (depth * lines / 8) * all + column + BLOCK + t % lines * 16 * PER;
            product<T, true>(width(p) / 16, units, stacked + t / 2 * 16 * units + t % 2 * 8, 0, b, c + t * 8 * width(p),
                             false, p ? (void*)b : (void*)next, p ? 0 : all * sizeof(T));
        }
    }
    u32* stack_weight(const T* w, int64_t depth, int64_t all, int64_t column) {
        u32* out = scratch<u32>(3, BLOCK * depth / PER);
        const T** rows = scratch<const T*>(4, depth);
        for (int64_t d = 0; d < depth; d++) rows[d] = w + d * all;
        for (int64_t v = 0; v < BLOCK && column + v < all; v += 16)
            stack<T>(rows, depth, column + v, all, 16, out + v * depth / PER);
        return out;
    }

    void forward() {
        gather(a.x);
        for (int64_t f = 0; f < F; f += 8)
            for (int64_t p = 0; p < panels; p++) {
                direct(up, f, F, D, 8, outside(p), p, c);
                direct(up + F * D, f, F, D, 8, outside(p), p, c + 8 * width(p));
                for (int l = 0; l < n(p); l += 16) swiglu(f, p, l);
            }
        for (int64_t d = 0; d < D; d += 16 * PER)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t columns = std::min(16 * PER, D - d);
                for (int64_t m = 0; m < columns; m += 8)
                    direct(down, d + m, D, F, 16 * PER, hidden + p * wide, p, c + m * width(p));
                scatter(d, columns, p, a.rows_y, a.y);
            }
    }
    void swiglu(int64_t f, int64_t p, int l) {
        const __mmask16 m = lanes(n(p) - l);
        const __m512 scale = gate(p, l);
        auto one = [&](int64_t i) {
            alignas(64) T g[16], u[16];  // rounded, as backward will see them
            store(g, 0xffff, _mm512_load_ps(c + i * width(p) + l));
            store(u, 0xffff, _mm512_load_ps(c + (8 + i) * width(p) + l));
            const __m512 gf = load(g, 0xffff), uf = load(u, 0xffff);
            if (a.pre) store(pre(p) + (f + i) * n(p) + l, m, gf), store(pre(p) + (F + f + i) * n(p) + l, m, uf);
            return gf * sigmoid(gf) * uf * scale;
        };
        for (int64_t i = 0; i < std::min<int64_t>(8, F - f); i += PER) {
            const __m512 even = one(i), odd = PER == 2 ? one(i + 1) : even;
            _mm512_store_si512(hidden + p * wide + (f + i) / PER * width(p) + l, unit((T*)0, even, odd));
        }
    }

    void backward() {
        alignas(64) float dgate[PANELS][PANEL] = {};
        gather(a.dy);
        for (int64_t f = 0; f < F; f += BLOCK) {
            u32* stacked = stack_weight(down, D, F, f);
            for (int64_t p = 0; p < panels; p++) {
                transposed(down, D, F, f, stacked, outside(p), p);
                for (int l = 0; l < n(p); l += 16) swiglu_backward(f, p, l, dgate[p] + l);
            }
        }
        for (int64_t p = 0; p < panels; p++) {
            u32* target[PANEL];
            auto keep = [&](int64_t to, int64_t columns, const u32* panel) {
                T* first = at<T>(to) + (chunk.row + p * PANEL) * columns;
                for (int64_t l = 0; l < n(p); l++) target[l] = (u32*)(first + l * columns);
                to_rows(panel + p * wide, columns / PER, width(p), n(p), target);
            };
            keep(a.hidden, F, hidden), keep(a.dpre, 2 * F, dpre);
            for (int l = 0; a.dgate && l < n(p); l++) at<float>(a.dgate)[slot[p * PANEL + l]] = dgate[p][l];
        }
        for (int64_t d = 0; a.dx && d < D; d += BLOCK) {
            u32* stacked = stack_weight(up, 2 * F, D, d);
            for (int64_t p = 0; p < panels; p++) {
                transposed(up, 2 * F, D, d, stacked, dpre + p * wide, p);
                scatter(d, std::min(BLOCK, D - d), p, a.rows_dx, a.dx);
            }
        }
    }
    void swiglu_backward(int64_t f, int64_t p, int l, float* dgate) {
        const __mmask16 m = lanes(n(p) - l);
        const __m512 scale = gate(p, l);
        __m512 sum = _mm512_load_ps(dgate), h[2], dg[2], du[2];
        for (int64_t i = 0; i < std::min(BLOCK, F - f); i += PER) {
            for (int64_t j = 0, k = f + i; j < PER; j++, k++) {
                const __m512 g = load(pre(p) + k * n(p) + l, m), u = load(pre(p) + (F + k) * n(p) + l, m);
                const __m512 s = sigmoid(g), act = g * s, dh = _mm512_load_ps(c + (i + j) * width(p) + l);
                h[j] = act * u;
                sum = _mm512_fmadd_ps(dh, h[j], sum);
                h[j] *= scale, du[j] = dh * scale * act, dg[j] = dh * scale * u * (s * (1.f + g * (1.f - s)));
            }
            u32 *to = hidden + p * wide + (f + i) / PER * width(p) + l, *dto = to + panels * wide;
            _mm512_store_si512(to, unit((T*)0, h[0], h[PER - 1]));
            _mm512_store_si512(dto, unit((T*)0, dg[0], dg[PER - 1]));
            _mm512_store_si512(dto + F / PER * width(p), unit((T*)0, du[0], du[PER - 1]));
        }
        _mm512_store_ps(dgate, sum);
    }
};

// ------------------------------------------------------------------ one expert's weight gradients
// 32 columns of one row; past the caches a whole line at a time
template <class O> static void emit(O* out, const float* c, int64_t columns, bool add, bool past) {
    const __m512 low = _mm512_load_ps(c), high = _mm512_load_ps(c + 16);
    if (past && !add && columns >= 32 && (int64_t)out % 64 == 0) {
        if (sizeof(O) == 2) return _mm512_stream_si512((__m512i*)out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        _mm512_stream_ps((float*)out, low), _mm512_stream_ps((float*)out + 16, high);
    } else {
        const __mmask16 m = lanes(columns), n = lanes(columns - 16);
        store(out, m, add ? low + load(out, m) : low), store(out + 16, n, add ? high + load(out + 16, n) : high);
    }
}
// rows [m, m + HEIGHT) of out [M, C] (+)= left [n, M] transposed @ right [n, C]
template <class T, class O>
static void weight(const T** left, const T** right, int64_t n, int64_t m, int64_t M, int64_t C, O* out, bool add,
                   bool past) {
    const int64_t height = std::min(HEIGHT, M - m), wide = (C + 31) / 32, PER = 4 / sizeof(T);
    if (n == 0 && !add) memset((void*)(out + m * C), 0, height * C * sizeof(O));
    const int64_t most = (std::min(n, DEPTH) + PER - 1) / PER;
    u32 *b = scratch<u32>(0, wide * 32 * most), *stacked = scratch<u32>(1, 16 * most);
    float* sums = scratch<float>(2, n <= DEPTH ? 256 : (height + 15) / 16 * 16 * wide * 32);
    for (int64_t k = 0; k < n; k += DEPTH) {
        const int64_t rows = std::min(n - k, DEPTH), units = (rows + PER - 1) / PER;
        for (int64_t v = 0; v < wide; v++) stack<T>(right + k, rows, v * 32, C, 32, b + v * 32 * units);
        for (int64_t i = 0; i < height; i += 16) {
            stack<T>(left + k, rows, m + i, M, 16, stacked);
            for (int64_t v = 0; v < wide; v++)
                for (int64_t h = i; h < std::min(i + 16, height); h += 8) {
                    float* c = n <= DEPTH ? sums : sums + (h / 8 * wide + v) * 256;
                    O* to = out + (m + h) * C + v * 32;
                    const int64_t there = std::min<int64_t>(8, height - h);
                    for (int64_t r = 0; add && r < 2 * there; r++)
                        _mm_prefetch((char*)(to + r / 2 * C + r % 2 * 16), _MM_HINT_T0);
                    product<T, true>(2, units, stacked + h % 16, 0, b + v * 32 * units, c, k > 0, b, 0);
                    for (int64_t r = 0; k + DEPTH >= n && r < there; r++)
                        emit<O>(to + r * C, c + r * 32, C - v * 32, add, past);
                }
        }
    }
}
template <class T> static void weights(const Args& a, const Chunk& c, bool up, int64_t m) {
    const int64_t M = up ? 2 * a.F : a.D, C = up ? a.D : a.F, *row = at<int64_t>(a.row) + c.row;
    const T **left = scratch<const T*>(3, c.rows), **right = scratch<const T*>(4, c.rows);
    for (int64_t r = 0; r < c.rows; r++) {
        left[r] = up ? at<T>(a.dpre) + (c.row + r) * 2 * a.F : at<T>(a.dy) + row[r] * a.D;
        right[r] = up ? at<T>(a.x) + row[r] * a.D : at<T>(a.hidden) + (c.row + r) * a.F;
    }
    const int64_t out = up ? a.d_up : a.d_down, add = up ? a.up_add : a.down_add, start = c.expert * M * C;
    if (up ? a.up_wide : a.down_wide) weight<T>(left, right, c.rows, m, M, C, at<float>(out) + start, add, a.stream);
    else weight<T>(left, right, c.rows, m, M, C, at<T>(out) + start, add, a.stream);
}

// ------------------------------------------------------------------ whole batches
static std::vector<Chunk> chunks(const Args& a, int64_t most) {  // large ones first; with WHOLE, empty experts too
    std::vector<Chunk> out;
    const int64_t* stop = at<int64_t>(a.offset);
    for (int64_t e = 0, start = 0; e < a.E; start = stop[e++]) {
        if (most == WHOLE) out.push_back({e, start, stop[e] - start});
        else for (int64_t r = start; r < stop[e]; r += most) out.push_back({e, r, std::min(most, stop[e] - r)});
    }
    std::stable_sort(out.begin(), out.end(), [](const Chunk& p, const Chunk& q) { return p.rows > q.rows; });
    return out;
}
static std::vector<Chunk> row_chunks(const Args& a) {  // small ones where there is little to share out
    return chunks(a, PANEL * (a.R >= a.threads * 4 * PANEL * PANELS ? PANELS : 1));
}
static std::vector<int64_t> places(const Args& a) {  // the row of a choice, -1 for none
    std::vector<int64_t> place(a.N * a.K, -1);
    for (int64_t r = 0; a.K && r < a.R; r++) place[at<int64_t>(a.slot)[r]] = r;
    return place;
}
// y [N, D]: the K rows of a position, in the order of its choices
template <class T> static void add_up(const Args& a, const int64_t* place, int64_t rows, int64_t y) {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < a.N; n++)
        for (int64_t d = 0; d < a.D; d += 16) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t k = n * a.K; k < (n + 1) * a.K; k++)
                if (place[k] >= 0) sum += load(at<T>(rows) + place[k] * a.D + d, lanes(a.D - d));
            store(at<T>(y) + n * a.D + d, lanes(a.D - d), sum);
        }
}
template <class T> static void forward(const Args& a) {
    const std::vector<Chunk> work = row_chunks(a);
    const std::vector<int64_t> place = places(a);
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) Rows<T>{a, work[i]}.forward();
        if (a.K) add_up<T>(a, place.data(), a.rows_y, a.y);
    }
}
template <class T> static void backward(const Args& a) {
    const std::vector<Chunk> work = row_chunks(a), experts = chunks(a, WHOLE);
    const std::vector<int64_t> place = places(a);
    const int64_t ups = a.d_up ? (2 * a.F + HEIGHT - 1) / HEIGHT : 0;
    const int64_t all = ups + (a.d_down ? (a.D + HEIGHT - 1) / HEIGHT : 0);
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) Rows<T>{a, work[i]}.backward();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.E * all; i++)
            weights<T>(a, experts[i / all], i % all < ups, (i % all < ups ? i % all : i % all - ups) * HEIGHT);
        _mm_sfence();
        if (a.K && a.dx) add_up<T>(a, place.data(), a.rows_dx, a.dx);
    }
}
extern "C" void moe_forward(const Args* a) { a->bf16 ? forward<bf16>(*a) : forward<float>(*a); }
extern "C" void moe_backward(const Args* a) { a->bf16 ? backward<bf16>(*a) : backward<float>(*a); }
