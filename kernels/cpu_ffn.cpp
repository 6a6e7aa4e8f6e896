// Expert feed-forward over ragged rows for AVX-512, forward and backward: one call each, experts over threads.
//
// Weights are read where they are, once a pass: they are the broadcast operand of every product. Rows of x and dy are
// packed with 16 of them in a vector, so an expert with one row costs one multiply-add per weight and runs at the rate
// of memory; with many rows the same loops run at the rate of the multipliers. All operands are 32-bit units: one float,
// or a pair of bfloat16 along the contraction (vdpbf16ps). Sums are float32 in the order of the contraction, whatever
// the threads, the other rows and who ran first: a row's result does not depend on its neighbours.
//
// Backward has two phases: rows (dhidden, dpre, dx; work items of one expert and up to 144 rows) and weights (work items
// of one expert and 256 rows of its gradient, which is written once, past the caches when it is larger than they are).
//
// Axis letters: N positions, K experts per position, R routed rows, E experts, D width, F expert width.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Args {  // as FIELDS in cpu_ffn.py
    int64_t bf16, threads, N, K, R, E, D, F, stream;
    int64_t x, gate, gate_up, down, offset, row, slot, pre, y;   // K = 0: no gates, every row of x is of one expert
    int64_t rows_y;                                              // [R, D]: results before they are added up
    int64_t dy, dgate, dx, rows_dx, hidden, dpre;                // [R, F], [R, 2F]
    int64_t d_up, up_wide, up_add, d_down, down_wide, down_add;  // wide: float32; add: to what is there
};

typedef uint32_t u32;
typedef uint16_t bf16;
static const int64_t PANEL = 48, PANELS = 3, BLOCK = 64, HEIGHT = 256, DEPTH = 320;

struct Scratch {  // of one thread, kept between calls
    static const int PARTS = 6;
    void* part[PARTS] = {};
    size_t size[PARTS] = {};
    template <class T> T* get(int i, int64_t count) {
        size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size[i]) {
            free(part[i]);
            part[i] = aligned_alloc(4096, size[i] = bytes);
        }
        return (T*)part[i];
    }
    ~Scratch() { for (void* p : part) free(p); }
};
static thread_local Scratch scratch;

struct Chunk { int64_t expert, row, rows, first; };  // rows of one expert; `first` row of the expert

static inline __mmask16 lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
template <class T> static inline T* at(int64_t address) { return (T*)address; }

// ------------------------------------------------------------------ a vector of T as float32, and as units
static inline __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
static inline __m512 load(const bf16* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
static inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
static inline void store(float* p, __mmask16 m, __m512 v) { _mm512_mask_storeu_ps(p, m, v); }
static inline void store(bf16* p, __mmask16 m, __m512 v) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }
static inline __m512i unit(const float*, __m512 a, __m512) { return _mm512_castps_si512(a); }
static inline __m512i unit(const bf16*, __m512 a, __m512 b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(a)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(b)), 16));
}
static inline __m512 mac(const float*, __m512 s, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), s);
}
static inline __m512 mac(const bf16*, __m512 s, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
}

static inline __m512 sigmoid(__m512 x) {  // 1 / (1 + exp(-x)); exp by 2^n times Taylor to r^7, |r| < 0.35
    const __m512 one = _mm512_set1_ps(1), edge = _mm512_set1_ps(88);
    x = _mm512_min_ps(edge, _mm512_max_ps(_mm512_set1_ps(-88), _mm512_sub_ps(_mm512_setzero_ps(), x)));  // NaN stays
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x), p = _mm512_set1_ps(1 / 5040.f);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    for (float c : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_div_ps(one, _mm512_add_ps(one, _mm512_scalef_ps(p, n)));
}

// ------------------------------------------------------------------ packing
static inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
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
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// out[unit][lane]: row `lane` of `row`, lanes past n are zero
static void rows_to_lanes(const u32* const* row, int n, int64_t units, int width, u32* out) {
    __m512i r[16];
    for (int l = 0; l < width; l += 16)
        for (int64_t k = 0; k < units; k += 16) {
            for (int i = 0; i < 16; i++)
                r[i] = l + i < n ? _mm512_maskz_loadu_epi32(lanes(units - k), row[l + i] + k) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < std::min<int64_t>(16, units - k); i++) _mm512_store_si512(out + (k + i) * width + l, r[i]);
        }
}

static void lanes_to_rows(const u32* in, int64_t units, int width, int n, u32* const* row) {
    __m512i r[16];
    for (int l = 0; l < n; l += 16)
        for (int64_t k = 0; k < units; k += 16) {
            for (int i = 0; i < 16; i++)
                r[i] = k + i < units ? _mm512_load_si512(in + (k + i) * width + l) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < 16 && l + i < n; i++) _mm512_mask_storeu_epi32(row[l + i] + k, lanes(units - k), r[i]);
        }
}

// out[k][column]: columns [column, column + width) of n rows, in units along the rows; zero past `columns`
template <class T> static void stack(const T* const* row, int64_t n, int64_t column, int64_t columns, int width, u32* out);
template <> void stack(const float* const* row, int64_t n, int64_t column, int64_t columns, int width, u32* out) {
    for (int64_t k = 0; k < n; k++)
        for (int v = 0; v < width; v += 16)
            _mm512_store_ps(out + k * width + v, load(row[k] + column + v, lanes(columns - column - v)));
}
template <> void stack(const bf16* const* row, int64_t n, int64_t column, int64_t columns, int width, u32* out) {
    for (int64_t k = 0; k < n; k += 2)
        for (int v = 0; v < width; v += 16) {
            __mmask16 m = lanes(columns - column - v), second = k + 1 < n ? m : 0;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, row[k] + column + v));
            const bf16* next = row[k + 1 < n ? k + 1 : k];
            __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, next + column + v));
            _mm512_store_si512(out + k / 2 * width + v, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

// ------------------------------------------------------------------ products
// c[8][16 * NV] (+)= a [8, k] @ b [k, 16 * NV]; a is stacked 16 wide, or eight rows; fetches a line per two units ahead
template <class T, int NV, bool STACKED>
static void tile(int64_t units, const u32* a, const u32* const* row, const u32* b, float* c, bool add, const char* ahead,
                 int64_t stride) {
    __m512 s[8][NV];
    for (int m = 0; m < 8; m++)
        for (int v = 0; v < NV; v++) s[m][v] = add ? _mm512_load_ps(c + (m * NV + v) * 16) : _mm512_setzero_ps();
    auto step = [&](int64_t k) __attribute__((always_inline)) {
        __m512i w[NV];
        for (int v = 0; v < NV; v++) w[v] = _mm512_load_si512(b + (k * NV + v) * 16);
#pragma GCC unroll 8
        for (int m = 0; m < 8; m++) {
            __m512i f = _mm512_set1_epi32(STACKED ? a[k * 16 + m] : row[m][k]);
            for (int v = 0; v < NV; v++) s[m][v] = mac((const T*)0, s[m][v], f, w[v]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= units; k += 2, ahead += stride) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        step(k), step(k + 1);
    }
    if (k < units) step(k);
    for (int m = 0; m < 8; m++)
        for (int v = 0; v < NV; v++) _mm512_store_ps(c + (m * NV + v) * 16, s[m][v]);
}

template <class T, bool STACKED>
static void product(int nv, int64_t units, const u32* a, const u32* const* row, const u32* b, float* c, bool add,
                    const void* ahead, int64_t stride) {
    auto form = nv == 1 ? tile<T, 1, STACKED> : nv == 2 ? tile<T, 2, STACKED> : tile<T, 3, STACKED>;
    form(units, a, row, b, c, add, (const char*)ahead, stride);
}

// c [columns, lanes] to columns [column, ...) of rows
template <class T>
static void to_rows(const float* c, int64_t column, int64_t columns, int width, int n, T* const* row) {
    const int per = 4 / sizeof(T);
    alignas(64) u32 units[16 * PANEL];
    u32* target[PANEL];
    for (int64_t d = 0; d < columns; d += 16 * per) {
        int64_t count = std::min<int64_t>(16, (columns - d) / per);
        for (int i = 0; i < count; i++)
            for (int l = 0; l < width; l += 16) {
                const float* p = c + (d + i * per) * width + l;
                _mm512_store_si512(units + i * width + l, unit((T*)0, _mm512_load_ps(p), _mm512_load_ps(p + (per - 1) * width)));
            }
        for (int l = 0; l < n; l++) target[l] = (u32*)(row[l] + column + d);
        lanes_to_rows(units, count, width, n, target);
    }
}

// ------------------------------------------------------------------ one expert's rows
template <class T> struct Rows {
    static const int PER = 4 / sizeof(T);
    const Args& a;
    const Chunk& chunk;
    int64_t D, F, panels;
    int n[PANELS], nv[PANELS];
    const int64_t *row, *slot;
    float gate[PANELS][PANEL];

    Rows(const Args& args, const Chunk& c) : a(args), chunk(c), D(args.D), F(args.F), panels((c.rows + PANEL - 1) / PANEL) {
        row = at<int64_t>(a.row) + c.row, slot = at<int64_t>(a.slot) + c.row;
        for (int64_t p = 0; p < panels; p++) {
            n[p] = std::min(PANEL, c.rows - p * PANEL), nv[p] = (n[p] + 15) / 16;
            for (int l = 0; l < PANEL; l++)
                gate[p][l] = l >= n[p] ? 0 : a.K ? at<float>(a.gate)[slot[p * PANEL + l]] : 1;
        }
    }
    T* pre(int64_t p) { return at<T>(a.pre) + (chunk.row + p * PANEL) * 2 * F; }  // [2F, n]
    void gather(int64_t from, u32* out) {
        const u32* source[PANEL];
        for (int64_t p = 0; p < panels; p++) {
            for (int l = 0; l < n[p]; l++) source[l] = (u32*)(at<T>(from) + row[p * PANEL + l] * D);
            rows_to_lanes(source, n[p], D / PER, nv[p] * 16, out + p * PANEL * (D / PER));
        }
    }
    void targets(int64_t rows, int64_t whole, int64_t p, T** out) {  // [R, D], or where the rows came from
        for (int l = 0; l < n[p]; l++)
            out[l] = a.K ? at<T>(rows) + (chunk.row + p * PANEL + l) * D : at<T>(whole) + row[p * PANEL + l] * D;
    }

    void forward() {
        const int64_t kept = a.pre != 0;
        u32* x = scratch.get<u32>(0, panels * PANEL * (D / PER) + 16);
        u32* hidden = scratch.get<u32>(1, panels * PANEL * ((F + 7) / PER) + 16);
        float* c = scratch.get<float>(2, 32 * PANEL);
        const T* up = at<T>(a.gate_up) + chunk.expert * 2 * F * D;
        const T* down = at<T>(a.down) + chunk.expert * D * F;
        const u32* w[16];
        gather(a.x, x);
        for (int64_t f = 0; f < F; f += 8) {
            for (int m = 0; m < 16; m++) w[m] = (u32*)(up + (std::min(f + m % 8, F - 1) + m / 8 * F) * D);
            for (int64_t p = 0; p < panels; p++) {
                const int width = nv[p] * 16;
                const u32* xp = x + p * PANEL * (D / PER);
                for (int h = 0; h < 2; h++)
                    product<T, false>(nv[p], D / PER, 0, w + 8 * h, xp, c + h * 8 * width, false,
                                      p ? (void*)xp : (void*)(up + (f + 8 + h * F) * D), p ? 0 : 64);
                swiglu(f, p, c, hidden + p * PANEL * ((F + 7) / PER), kept ? pre(p) : 0);
            }
        }
        T* target[PANEL];
        for (int64_t d = 0; d < D; d += 16 * PER)
            for (int64_t p = 0; p < panels; p++) {
                const u32* hp = hidden + p * PANEL * ((F + 7) / PER);
                for (int64_t t = 0; t < 2 * PER && d + 8 * t < D; t++) {
                    for (int m = 0; m < 8; m++) w[m] = (u32*)(down + std::min(d + 8 * t + m, D - 1) * F);
                    product<T, false>(nv[p], F / PER, 0, w, hp, c + t * 8 * nv[p] * 16, false,
                                      p ? (void*)hp : (void*)(down + (d + 8 * t + 16 * PER) * F), p ? 0 : 64);
                }
                targets(a.rows_y, a.y, p, target);
                to_rows<T>(c, d, std::min<int64_t>(16 * PER, D - d), nv[p] * 16, n[p], target);
            }
    }

    void swiglu(int64_t f, int64_t p, const float* c, u32* hidden, T* pre) {
        const int width = nv[p] * 16;
        for (int l = 0; l < width; l += 16) {
            const __mmask16 m = lanes(n[p] - l);
            const __m512 scale = _mm512_loadu_ps(gate[p] + l);
            auto one = [&](int64_t i) {
                __m512 g = _mm512_load_ps(c + i * width + l), u = _mm512_load_ps(c + (8 + i) * width + l);
                alignas(64) T rounded[2][16];  // what backward will see
                store(rounded[0], 0xffff, g), store(rounded[1], 0xffff, u);
                g = load(rounded[0], 0xffff), u = load(rounded[1], 0xffff);
                if (pre) store(pre + (f + i) * n[p] + l, m, g), store(pre + (F + f + i) * n[p] + l, m, u);
                return _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u), scale);
            };
            for (int64_t i = 0; i < std::min<int64_t>(8, F - f); i += PER) {
                __m512 even = one(i), odd = PER == 2 ? one(i + 1) : even;
                _mm512_store_si512(hidden + (f + i) / PER * width + l, unit((T*)0, even, odd));
            }
        }
    }

    // c [columns, lanes] = columns [column, ...) of w [depth, columns], transposed, times b; w's next columns are fetched
    void transposed(const T* w, int64_t depth, int64_t all, int64_t column, const u32* stacked, const u32* b, int64_t p,
                    float* c) {
        for (int64_t t = 0; t < std::min(BLOCK, all - column + 7) / 8; t++) {
            const int64_t lines = BLOCK * sizeof(T) / 64, start = t / lines * (depth * lines / 8);
            const T* ahead = w + start * all + column + BLOCK + t % lines * (64 / sizeof(T));
            product<T, true>(nv[p], (depth + PER - 1) / PER, stacked + t / 2 * 16 * ((depth + 1) / PER) + t % 2 * 8, 0, b,
                             c + t * 8 * nv[p] * 16, false, p ? (void*)b : (void*)ahead, p ? 0 : all * sizeof(T));
        }
    }
    u32* stack_weight(const T* w, int64_t depth, int64_t all, int64_t column) {
        u32* out = scratch.get<u32>(3, BLOCK * ((depth + 1) / PER) + 16);
        const T** row = scratch.get<const T*>(4, depth);
        for (int64_t d = 0; d < depth; d++) row[d] = w + d * all;
        for (int64_t v = 0; v < BLOCK && column + v < all; v += 16)
            stack<T>(row, depth, column + v, all, 16, out + v * ((depth + 1) / PER));
        return out;
    }

    void backward() {
        const int64_t stride = PANEL * ((2 * F + 15) / PER);
        u32* dy = scratch.get<u32>(0, panels * PANEL * (D / PER) + 16);
        u32* inner = scratch.get<u32>(1, 2 * panels * stride);  // hidden, then dpre
        float* c = scratch.get<float>(2, BLOCK * PANEL);
        const T* up = at<T>(a.gate_up) + chunk.expert * 2 * F * D;
        const T* down = at<T>(a.down) + chunk.expert * D * F;
        alignas(64) float dgate[PANELS][PANEL] = {};
        gather(a.dy, dy);
        for (int64_t f = 0; f < F; f += BLOCK) {
            const u32* stacked = stack_weight(down, D, F, f);
            for (int64_t p = 0; p < panels; p++) {
                transposed(down, D, F, f, stacked, dy + p * PANEL * (D / PER), p, c);
                u32* hidden = inner + p * stride;
                swiglu_backward(f, p, c, hidden, hidden + panels * stride, dgate[p]);
            }
        }
        T* target[PANEL];
        for (int64_t p = 0; p < panels; p++) {
            for (int part = 0; part < 2; part++) {
                T* to = at<T>(part ? a.dpre : a.hidden) + (chunk.row + p * PANEL) * F * (1 + part);
                for (int l = 0; l < n[p]; l++) target[l] = to + l * F * (1 + part);
                lanes_to_rows(inner + (part * panels + p) * stride, F * (1 + part) / PER, nv[p] * 16, n[p], (u32**)target);
            }
            for (int l = 0; a.dgate && l < n[p]; l++) at<float>(a.dgate)[slot[p * PANEL + l]] = dgate[p][l];
        }
        for (int64_t d = 0; a.dx && d < D; d += BLOCK) {
            const u32* stacked = stack_weight(up, 2 * F, D, d);
            for (int64_t p = 0; p < panels; p++) {
                transposed(up, 2 * F, D, d, stacked, inner + (panels + p) * stride, p, c);
                targets(a.rows_dx, a.dx, p, target);
                to_rows<T>(c, d, std::min(BLOCK, D - d), nv[p] * 16, n[p], target);
            }
        }
    }

    void swiglu_backward(int64_t f, int64_t p, const float* c, u32* hidden, u32* dpre, float* dgate) {
        const int width = nv[p] * 16;
        const T* pre = this->pre(p);
        const __m512 one = _mm512_set1_ps(1);
        for (int l = 0; l < width; l += 16) {
            const __mmask16 m = lanes(n[p] - l);
            const __m512 scale = _mm512_loadu_ps(gate[p] + l);
            __m512 sum = _mm512_load_ps(dgate + l), out[3][2];  // hidden, dg, du
            for (int64_t i = 0; i < std::min(BLOCK, F - f); i += PER) {
                for (int j = 0; j < PER; j++) {
                    __m512 g = load(pre + (f + i + j) * n[p] + l, m), u = load(pre + (F + f + i + j) * n[p] + l, m);
                    __m512 s = sigmoid(g), act = _mm512_mul_ps(g, s), h = _mm512_mul_ps(act, u);
                    __m512 dh = _mm512_load_ps(c + (i + j) * width + l);
                    sum = _mm512_fmadd_ps(dh, h, sum);
                    dh = _mm512_mul_ps(dh, scale);
                    __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(g, _mm512_sub_ps(one, s), one));
                    out[0][j] = _mm512_mul_ps(h, scale), out[2][j] = _mm512_mul_ps(dh, act);
                    out[1][j] = _mm512_mul_ps(_mm512_mul_ps(dh, u), slope);
                }
                const int64_t k = (f + i) / PER * width + l;
                _mm512_store_si512(hidden + k, unit((T*)0, out[0][0], out[0][PER - 1]));
                _mm512_store_si512(dpre + k, unit((T*)0, out[1][0], out[1][PER - 1]));
                _mm512_store_si512(dpre + F / PER * width + k, unit((T*)0, out[2][0], out[2][PER - 1]));
            }
            _mm512_store_ps(dgate + l, sum);
        }
    }
};

// ------------------------------------------------------------------ one expert's weight gradients
template <class O> static inline void emit(O* out, const float* c, int64_t columns, bool add, bool past) {
    for (int v = 0; v < 32; v += 16) {
        const __mmask16 m = lanes(columns - v);
        __m512 s = _mm512_load_ps(c + v);
        if (past && sizeof(O) == 4 && m == 0xffff) _mm512_stream_ps((float*)out + v, s);
        else store(out + v, m, add ? _mm512_add_ps(s, load(out + v, m)) : s);
    }
}
template <> void emit(bf16* out, const float* c, int64_t columns, bool, bool past) {
    __m512 low = _mm512_load_ps(c), high = _mm512_load_ps(c + 16);
    if (past && columns >= 32) _mm512_stream_si512((__m512i*)out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    else store(out, lanes(columns), low), store(out + 16, lanes(columns - 16), high);
}

// rows [m, m + HEIGHT) of out [M, C] (+)= left [n, M] transposed @ right [n, C]
template <class T, class O>
static void weight(const T** left, const T** right, int64_t n, int64_t m0, int64_t M, int64_t C, O* out, bool add, bool stream) {
    const int PER = 4 / sizeof(T);
    const int64_t height = std::min(HEIGHT, M - m0), wide = (C + 31) / 32;
    if (n == 0) {
        if (!add) memset((void*)(out + m0 * C), 0, height * C * sizeof(O));
        return;
    }
    const int64_t depth = std::min(n, DEPTH), units = (depth + 1) / PER;
    u32* b = scratch.get<u32>(0, wide * 32 * units + 16);
    u32* stacked = scratch.get<u32>(1, 16 * units + 16);
    float* sums = scratch.get<float>(2, n <= DEPTH ? 256 : ((height + 15) / 16) * 16 * wide * 32);
    for (int64_t k = 0; k < n; k += DEPTH) {
        const int64_t rows = std::min(n - k, DEPTH), now = (rows + PER - 1) / PER;
        for (int64_t v = 0; v < wide; v++) stack<T>(right + k, rows, v * 32, C, 32, b + v * 32 * units);
        for (int64_t i = 0; i < height; i += 16) {
            stack<T>(left + k, rows, m0 + i, M, 16, stacked);
            for (int64_t v = 0; v < wide; v++)
                for (int64_t h = i; h < std::min(i + 16, height); h += 8) {
                    float* c = n <= DEPTH ? sums : sums + (h / 8 * wide + v) * 256;
                    O* to = out + (m0 + h) * C + v * 32;
                    const int64_t there = std::min<int64_t>(8, height - h);
                    if (add)
                        for (int r = 0; r < there; r++)
                            for (int s = 0; s < 32; s += 64 / sizeof(O)) _mm_prefetch((char*)(to + r * C + s), _MM_HINT_T0);
                    product<T, true>(2, now, stacked + h % 16, 0, b + v * 32 * units, c, k > 0, b, 0);
                    if (k + DEPTH < n) continue;
                    for (int r = 0; r < there; r++) {
                        const bool line = ((int64_t)(to + r * C) & 63) == 0;
                        emit<O>(to + r * C, c + r * 32, C - v * 32, add, stream && line && !add);
                    }
                }
        }
    }
}

template <class T> static void weights(const Args& a, const Chunk& c, bool up, int64_t m0) {
    const int64_t M = up ? 2 * a.F : a.D, C = up ? a.D : a.F, *row = at<int64_t>(a.row) + c.row;
    const T** left = scratch.get<const T*>(3, c.rows);
    const T** right = scratch.get<const T*>(4, c.rows);
    for (int64_t r = 0; r < c.rows; r++) {
        left[r] = up ? at<T>(a.dpre) + (c.row + r) * 2 * a.F : at<T>(a.dy) + row[r] * a.D;
        right[r] = up ? at<T>(a.x) + row[r] * a.D : at<T>(a.hidden) + (c.row + r) * a.F;
    }
    const int64_t out = up ? a.d_up : a.d_down, wide = up ? a.up_wide : a.down_wide, add = up ? a.up_add : a.down_add;
    if (wide) weight<T, float>(left, right, c.rows, m0, M, C, at<float>(out) + c.expert * M * C, add, a.stream);
    else weight<T, T>(left, right, c.rows, m0, M, C, at<T>(out) + c.expert * M * C, add, a.stream);
}

// ------------------------------------------------------------------ whole batches
static std::vector<Chunk> chunks(const Args& a, int64_t most) {
    std::vector<Chunk> out;
    const int64_t* stop = at<int64_t>(a.offset);
    for (int64_t e = 0; e < a.E; e++) {
        const int64_t start = e ? stop[e - 1] : 0, n = stop[e] - start;
        for (int64_t r = 0; r < n || (r == 0 && most == INT64_MAX); r += most)
            out.push_back({e, start + r, std::min(most, n - r), r});
    }
    std::stable_sort(out.begin(), out.end(), [](const Chunk& p, const Chunk& q) { return p.rows > q.rows; });
    return out;
}
static std::vector<Chunk> row_chunks(const Args& a) {  // small ones where there is little to share out
    return chunks(a, PANEL * (a.R >= a.threads * 4 * PANEL * PANELS ? PANELS : 1));
}
static std::vector<int64_t> places(const Args& a) {  // the row of a choice, -1 for none
    std::vector<int64_t> row(a.N * a.K, -1);
    for (int64_t r = 0; r < a.R && a.K; r++) row[at<int64_t>(a.slot)[r]] = r;
    return row;
}
template <class T> static void add_up(const Args& a, const T* rows, const int64_t* place, T* out) {  // one position
    for (int64_t d = 0; d < a.D; d += 16) {
        const __mmask16 m = lanes(a.D - d);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < a.K; k++)
            if (place[k] >= 0) sum = _mm512_add_ps(sum, load(rows + place[k] * a.D + d, m));
        store(out + d, m, sum);
    }
}

template <class T> static void forward(const Args& a) {
    const std::vector<Chunk> work = row_chunks(a);
    const std::vector<int64_t> place = places(a);
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) Rows<T>(a, work[i]).forward();
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (a.K ? a.N : 0); n++) add_up<T>(a, at<T>(a.rows_y), &place[n * a.K], at<T>(a.y) + n * a.D);
    }
}

template <class T> static void backward(const Args& a) {
    const std::vector<Chunk> work = row_chunks(a), experts = chunks(a, INT64_MAX);
    const std::vector<int64_t> place = places(a);
    const int64_t ups = a.d_up ? (2 * a.F + HEIGHT - 1) / HEIGHT : 0, downs = a.d_down ? (a.D + HEIGHT - 1) / HEIGHT : 0;
    const int64_t each = ups + downs;
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) Rows<T>(a, work[i]).backward();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.E * each; i++)
            weights<T>(a, experts[i / each], i % each < ups, (i % each - (i % each < ups ? 0 : ups)) * HEIGHT);
        _mm_sfence();
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (a.K && a.dx ? a.N : 0); n++)
            add_up<T>(a, at<T>(a.rows_dx), &place[n * a.K], at<T>(a.dx) + n * a.D);
    }
}

extern "C" void moe_forward(const Args* a) { a->bf16 ? forward<bf16>(*a) : forward<float>(*a); }
extern "C" void moe_backward(const Args* a) { a->bf16 ? backward<bf16>(*a) : backward<float>(*a); }
