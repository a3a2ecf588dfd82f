// The kernels of sparse training as one interface: formula, shapes and aliasing of each. The
// processor implements it in kernels/cpu/, CUDA in cuda/, with the same bits everywhere;
// pycomm/reference.py is the meaning of every kernel in NumPy.
//
// What holds for all of them:
//   * Whoever calls has validated: sizes agree, nothing that is written overlaps anything else
//     unless it is said, pointers are aligned to their elements, and an array or the arrays of one
//     selection together have fewer than 2^31 elements. pycomm/kernels does that.
//   * Arithmetic is that of one element, in float32 for 16-bit and 32-bit floats and in float64 for
//     float64, in exactly the operations written here: fma rounds once, everything rounds to
//     nearest even, subnormals are kept, and a NaN that is computed is the one quiet NaN
//     (0x7fc00000).
//   * The magnitude of x is its bits without the sign, as an integer. So NaN ranks above infinity,
//     infinity above all finite numbers, and nothing is ever a matter of opinion.
//   * Indices are int32 and ascend. Ties go to the lower index. Indices that a call is given may be
//     wrong, as they come from other ranks: the processor throws InvalidArgument before anything
//     changes where they do not ascend within 0..count-1; a GPU, which cannot tell in time, leaves
//     out those beyond the end and never touches other memory.
//   * A workspace is memory of the device, aligned to 16 bytes, of the size that the function
//   beside
//     says. Nothing else is allocated on a GPU, and nothing waits for the device there: a call is
//     over when the stream gets there. On the processor it is over when it returns.
//   * Implementations hold no state: any number of threads may call, with different arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace pycomm {

// Where a call runs. The processor looks at neither.
struct Queue {
  int device = 0;
  void* stream = nullptr;
};

struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The tables below come from Python as rows of 64-bit words, so they hold nothing else.

struct Array {
  void* data;
  size_t count;
};

// One tensor of a DGC step. `grad` and `weight` are read, u and v are read and written.
struct DgcPiece {
  const void* grad;
  const void* weight;  // null without decay
  void* u;
  void* v;
  size_t count;
};

// k elements chosen from the next `pieces` tensors of the table, laid end to end: an index is
// `first` plus the place in all of them. Selections take the tensors in order and use them up.
struct DgcSelection {
  size_t pieces;
  size_t k;
  size_t first;
  int32_t* indices;  // [k]
  void* values;      // [k], dtype of u and v
  void* u_values;    // [k], the same; may be null
};

struct DgcTables {
  std::span<const DgcPiece> pieces;
  std::span<const DgcSelection> selections;
  Dtype dtype;  // of u, v and values: float32 or float64
};

struct DgcStep {
  DgcTables tables;
  Dtype grad_dtype;    // float16, bfloat16 or float32; float64 where u and v are
  Dtype weight_dtype;  // that of the gradients, or that of u and v
  double momentum;     // these three are rounded to the dtype of u and v
  double weight_decay;
  double scale;
  const void* scales;  // [pieces], dtype of u and v: takes the place of `scale`; may be null
  bool nesterov;
  bool masking;
  const float* found_inf;  // one number on the device; may be null
  Workspace workspace;
};

// A packet as it lies in memory: `count` of (index, value).
struct Packet {
  const int32_t* indices;
  const void* values;
  size_t count;
};

// Arrays of one dtype, laid end to end: an index counts through all of them.
struct Chain {
  std::span<const Array> arrays;
  Dtype dtype;
};

// An array of one dtype.
struct TypedArray {
  void* data;
  size_t count;
  Dtype dtype;
};

struct LeanEncoding;  // lean.h

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // ---- the DGC step (arXiv 1712.01887, with momentum correction and factor masking) -------------

  // For each element of each tensor, where s = scales[tensor], or scale:
  //   x = fma(weight_decay, weight, s * grad)      s * grad without decay (weight_decay is 0)
  //   u = fma(momentum, u, x)                      Nesterov: t = u + x; u = momentum * t
  //   v = v + u                                    Nesterov: v = v + (u + x)
  // then for each selection the k largest magnitudes of v:
  //   indices, values = where they are, and v there
  //   u_values = u there
  //   v = 0 there, and u = 0 there if masking or if the value is not finite.
  // Where found_inf is not 0 nothing of that happens: u and v stay, and the packet is the first k
  // indices with values and u_values 0.
  // The workspace belongs to these tables: full of zeros before the first step, and left alone
  // between steps. What it holds makes the next step faster and never changes a result.
  virtual void dgc_step(const DgcStep& step, Queue queue) = 0;
  virtual size_t dgc_workspace_bytes(const DgcTables& tables) = 0;

  // Undoes the sending of a step: v = values, u = u_values at the indices; nothing where found_inf
  // is not 0. Reads u, v and count of the pieces.
  virtual void dgc_rollback(const DgcTables& tables, const float* found_inf, Queue queue) = 0;

  // u[indices] = 0, v[indices] = 0, of arrays of `count`; u or v may be null.
  struct Positions {
    std::span<const int32_t> indices;
    size_t count;
    Dtype dtype;  // of u and v
  };
  virtual void momentum_mask(void* u, void* v, const Positions& where, Queue queue) = 0;

  // ---- selection --------------------------------------------------------------------------------

  // The k largest magnitudes of x (any float dtype): where they are and what is there. `indices`
  // and `values` may be null. `threshold` may be null; else it becomes the k-th magnitude, sign
  // clear. k is at most x.count, and at least 1 if there is a threshold.
  struct TopK {
    size_t k;
    int32_t* indices;  // [k]
    void* values;      // [k], dtype of x
    void* threshold;   // [1], dtype of x
    Workspace workspace;
  };
  virtual void topk(TypedArray x, const TopK& what, Queue queue) = 0;
  virtual size_t topk_workspace_bytes(size_t count, size_t k, Dtype dtype) = 0;

  // ---- packets ----------------------------------------------------------------------------------

  // Values may be of any float dtype; they are rounded to the dtype of the arithmetic of `out`, and
  // so are scale, lr and every product and sum.

  // out[i] = out[i] + scale * value, for each (index, value) of the packet.
  virtual void scatter_add(TypedArray out, const Packet& packet, Dtype value_dtype, double scale,
                           Queue queue) = 0;

  // out[i] = scale * sum over packets of value, 0 where no packet has i. The sum begins with the
  // first packet that has i and adds the others in the order of the list.
  virtual void decode_sum(const Chain& out, std::span<const Packet> packets, Dtype value_dtype,
                          double scale, Queue queue) = 0;

  // param[i] = fma(-lr, scale * sum, param[i]), only where a packet has i; sum as above.
  struct Update {
    double lr;
    double scale;
  };
  virtual void decode_update(const Chain& param, std::span<const Packet> packets, Dtype value_dtype,
                             Update update, Queue queue) = 0;

  // Writes an encoded packet, packet.h, of `value_dtype` from values of `dtype` of an array of
  // `count` elements. residual[i] = residual[i] + (value - what was written), where there is a
  // residual ([count], dtype of the values; may be null).
  struct Encoding {
    size_t count;
    Dtype dtype;
    Dtype value_dtype;
    void* residual;
    std::byte* out;  // raw_packet_bytes(k, value_dtype)
  };
  virtual void encode(const Packet& packet, const Encoding& encoding, Queue queue) = 0;

  // ---- lean packets, lean.h ---------------------------------------------------------------------

  // Writes one to room.out, of most_lean_bytes(), and how many bytes it took to *room.bytes, a
  // number on the device. Where indices do not ascend within 0..count-1, the processor throws, and
  // a GPU says 0 bytes; the residual stays as it was. The workspace holds nothing between calls.
  struct LeanRoom {
    std::byte* out;
    uint64_t* bytes;
    Workspace workspace;
  };
  virtual void encode_lean(const Packet& packet, const LeanEncoding& encoding, const LeanRoom& room,
                           Queue queue) = 0;

  // Reads one of k elements of an array of `count`, from any bytes. *refused, a number on the
  // device, becomes 0, and the indices ascend within 0..count-1; or, where the bytes are no such
  // packet, the processor throws, and a GPU says 1: then all indices are -1 and all values 0.
  struct LeanPacket {
    std::span<const std::byte> bytes;
    size_t k;
    size_t count;
  };
  struct LeanArrays {
    int32_t* indices;  // [k]
    float* values;     // [k]
    uint32_t* refused;
    Workspace workspace;
  };
  virtual void decode_lean(const LeanPacket& packet, const LeanArrays& to, Queue queue) = 0;
  // For either, of k elements; `bytes` are those of the packet to be read, or 0.
  virtual size_t lean_workspace_bytes(size_t k, size_t bytes) = 0;

  // ---- dense
  // --------------------------------------------------------------------------------------

  // norms[j] = sqrt(sum of squares of arrays[j]), in float64, in one order of additions:
  // S(a) of an array a of squares is, in tiles of 4096 elements,
  //   lane[j] = a[j] + a[128 + j] + a[256 + j] + ...   left to right, j < 128; fma(x, x, lane)
  //   tile = the lanes added in pairs: lane[j] += lane[j + w] for w = 64, 32, ..., 1
  // and S of the tiles' sums (without squaring) until one number is left. A lane without elements
  // is 0, and an array without elements has the norm 0.
  virtual void norm(std::span<const Array> arrays, Dtype dtype, double* norms, Workspace workspace,
                    Queue queue) = 0;
  virtual size_t norm_workspace_bytes(std::span<const Array> arrays) = 0;

  // factors[j] = scale * min(1, limit / norms[j]), computed in float64 and rounded to the dtype of
  // `factors`; a norm that is 0 or not finite does not clip.
  struct Clip {
    double limit;
    double scale;
  };
  virtual void clip_scale(const double* norms, TypedArray factors, Clip clip, Queue queue) = 0;

  // x[i] = x[i] * factor, a number on the device of the dtype of x's arithmetic. Factor 1 changes
  // nothing.
  virtual void multiply(TypedArray x, const void* factor, Queue queue) = 0;

  // out[i] = x[i] rounded to the dtype of `out`; floats only; the arrays have the same count.
  virtual void cast(TypedArray x, TypedArray out, Queue queue) = 0;

  // out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right; 16-bit floats are rounded once. `out`
  // may be one of xs. What each dtype and operation means: kernels.h.
  virtual void reduce(TypedArray out, std::span<const void* const> xs, ReduceOp op,
                      Queue queue) = 0;
};

// The processor's. Large arrays are shared by as many threads as set_kernel_threads() has said, at
// first one for each processor that this process may use; results do not depend on it.
DeviceKernels& cpu_kernels();
void set_kernel_threads(int threads);
int kernel_threads();

// The instruction set of the processor's loops: "baseline", "avx2" or "avx512", at first the best
// that runs here. Results do not depend on it; tests choose. Throws Unsupported for one that does
// not run here.
void set_kernel_isa(std::string_view name);
std::string_view kernel_isa();

}  // namespace pycomm
