// One-shot and two-shot all-reduce over symmetric memory, in rank order.
//
// Blocks of equal index on all ranks work together, and no block waits for another block of its
// rank. They exchange data in rounds. In a round, a block
//
//   1. stores packs into its slot in the regions of all ranks, its own included,
//   2. stores the number of the round into its flag in these regions (release, system scope),
//   3. waits until the flags of all ranks in its own region have this number (acquire, system
//      scope), and
//   4. loads the slots of all ranks, which are in its own memory.
//
// One-shot is one round: the slots contain arrays, which each rank reduces in rank order. Two-shot
// is two: the slots contain parts of arrays, then reduced parts.
//
// Order of a round. The barrier of the block orders the stores of 1 before the release of 2; the
// acquire of 3 and the next barrier order that before the loads of 4. Flags and slots are in device
// memory, and a release or acquire of system scope orders accesses of other GPUs too.
//
// Reuse. Odd and even rounds have different slots. A rank stores into the slots of round n after it
// acquired the flags of round n - 1 of all ranks. Each rank released that flag after its loads of
// round n - 2, behind a barrier of the block. So no slot is overwritten before it was read, and one
// exchange of flags per round is enough.
//
// Numbers only grow, so flags are never reset. Each block keeps its number in its rank's region:
// launches have no argument that changes, so a graph can repeat them. A flag may be one round
// ahead, because a rank that has the flags of a round may begin the next.
#include <algorithm>
#include <string>

#include "cuda/arithmetic.cuh"
#include "cuda/host.hpp"
#include "cuda/symmetric.hpp"

namespace pycomm::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kMostBlocks = 32;
constexpr unsigned kMostRanks = device::kMostSymmetricRanks;
constexpr size_t kSliceBytes = size_t{16} << 10;  // of a slot, for each block
constexpr size_t kLine = 128;                     // pieces are cut at multiples of this
constexpr unsigned kPollsPerCheck = 64;

// What only blocks of one index share.
struct BlockState {
  unsigned flags[kMostRanks];  // by rank: the last round that it announced
  unsigned number;             // of the last round here
  unsigned unused[15];
};
static_assert(sizeof(BlockState) == kLine);
constexpr size_t kStateBytes = kMostBlocks * sizeof(BlockState);

// Kernel parameters.
struct Regions {
  std::byte* of[kMostRanks];
  const unsigned* aborted;
  unsigned rank, size;
};

struct Arrays {
  size_t count;
  unsigned piece;  // elements, at most kSliceBytes
  ReduceOp op;
  bool aligned_in, aligned_out;  // to 16 bytes
};

template <class T>
inline constexpr unsigned kPack = 16 / sizeof(T);

template <class T>
struct Pack {
  T at[kPack<T>];
};

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
  return bits_as<Pack<T>>(gpu::load(reinterpret_cast<const uint4*>(p)));
}
template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack) {
  gpu::store(reinterpret_cast<uint4*>(p), bits_as<uint4>(pack));
}

// The pack at element i of an array of `count` elements, which may be unaligned; zeros beyond it.
template <class T>
__device__ __forceinline__ Pack<T> load_from(const T* p, size_t i, size_t count, bool aligned) {
  if (aligned && i + kPack<T> <= count) return load_pack(p + i);
  Pack<T> pack;
#pragma unroll
  for (unsigned e = 0; e < kPack<T>; ++e) pack.at[e] = i + e < count ? gpu::load(p + i + e) : T{};
  return pack;
}
template <class T>
__device__ __forceinline__ void store_to(T* p, size_t i, const Pack<T>& pack, size_t count,
                                         bool aligned) {
  if (aligned && i + kPack<T> <= count) return store_pack(p + i, pack);
#pragma unroll
  for (unsigned e = 0; e < kPack<T>; ++e)
    if (i + e < count) gpu::store(p + i + e, pack.at[e]);
}

__device__ __forceinline__ BlockState& state_of(const Regions& regions, unsigned owner) {
  return reinterpret_cast<BlockState*>(regions.of[owner])[blockIdx.x];
}

// The part of a slot that belongs to this block: in the region of `owner`, filled by `source`.
template <class T>
__device__ __forceinline__ T* slot(const Regions& regions, unsigned owner, unsigned source,
                                   unsigned number) {
  const size_t index = (number % 2 * regions.size + source) * kMostBlocks + blockIdx.x;
  return reinterpret_cast<T*>(regions.of[owner] + kStateBytes + index * kSliceBytes);
}

// Stores a pack at element i of this rank's slot in the regions of all ranks, each rank in another
// order.
template <class T>
__device__ __forceinline__ void send(const Regions& regions, unsigned number, unsigned i,
                                     const Pack<T>& pack) {
  unsigned owner = regions.rank;
  for (unsigned done = 0; done < regions.size; ++done) {
    store_pack(slot<T>(regions, owner, regions.rank, number) + i, pack);
    owner = owner + 1 == regions.size ? 0 : owner + 1;
  }
}

// The reduction of pack i of all slots, in rank order, with several loads in flight.
template <class T>
__device__ __forceinline__ Pack<T> reduce_slots(const Regions& regions, unsigned number, unsigned i,
                                                ReduceOp op) {
  constexpr unsigned kTogether = sizeof(T) < 4 ? 2 : 4;  // more would spill registers
  using Sum = decltype(to_sum(T{}));
  Sum sum[kPack<T>] = {};
  for (unsigned first = 0; first < regions.size; first += kTogether) {
    Pack<T> packs[kTogether];
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j)
      if (first + j < regions.size)
        packs[j] = load_pack(slot<T>(regions, regions.rank, first + j, number) + i);
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      if (first + j >= regions.size) continue;
#pragma unroll
      for (unsigned e = 0; e < kPack<T>; ++e)
        sum[e] = first + j == 0 ? to_sum(packs[j].at[e]) : join(op, sum[e], to_sum(packs[j].at[e]));
    }
  }
  Pack<T> result;
#pragma unroll
  for (unsigned e = 0; e < kPack<T>; ++e) result.at[e] = from_sum<T>(op, sum[e], regions.size);
  return result;
}

// Waits for the flag of one rank. Whether it came before the call was aborted.
__device__ __forceinline__ bool wait_for(const unsigned* flag, unsigned number,
                                         const unsigned* aborted) {
  for (unsigned polls = 1; static_cast<int>(gpu::load_acquire_system(flag) - number) < 0; ++polls)
    if (polls % kPollsPerCheck == 0 && gpu::load_relaxed_system(aborted) != 0) return false;
  return true;
}

// Ends the sends of a round and waits for those of all ranks. Whether they came; equal in all
// threads of the block.
__device__ __forceinline__ bool exchange_flags(const Regions& regions, unsigned number) {
  __syncthreads();
  bool came = true;
  if (threadIdx.x < regions.size) {
    gpu::store_release_system(&state_of(regions, threadIdx.x).flags[regions.rank], number);
    came = wait_for(&state_of(regions, regions.rank).flags[threadIdx.x], number, regions.aborted);
  }
  return __syncthreads_or(came ? 0 : 1) == 0;
}

// One round: the elements from `begin` on, at most a piece.
template <class T>
__device__ __forceinline__ bool one_shot(const Regions& regions, const Arrays& arrays, const T* in,
                                         T* out, size_t begin, unsigned& number) {
  ++number;
  const auto each = [&](auto f) {
    for (unsigned i = threadIdx.x * kPack<T>; i < arrays.piece && begin + i < arrays.count;
         i += kThreads * kPack<T>)
      f(i);
  };
  each([&](unsigned i) {
    send(regions, number, i, load_from(in, begin + i, arrays.count, arrays.aligned_in));
  });
  if (!exchange_flags(regions, number)) return false;
  each([&](unsigned i) {
    store_to(out, begin + i, reduce_slots<T>(regions, number, i, arrays.op), arrays.count,
             arrays.aligned_out);
  });
  return true;
}

// Two rounds: the elements from `begin` on, at most a piece for each rank. Rank r reduces piece r.
template <class T>
__device__ __forceinline__ bool two_shot(const Regions& regions, const Arrays& arrays, const T* in,
                                         T* out, size_t begin, unsigned& number) {
  const auto each = [&](unsigned owner, auto f) {
    const size_t first = begin + size_t{owner} * arrays.piece;
    for (unsigned i = threadIdx.x * kPack<T>; i < arrays.piece && first + i < arrays.count;
         i += kThreads * kPack<T>)
      f(i, first + i);
  };
  ++number;
  unsigned owner = regions.rank;
  for (unsigned done = 0; done < regions.size; ++done) {
    each(owner, [&](unsigned i, size_t at) {
      store_pack(slot<T>(regions, owner, regions.rank, number) + i,
                 load_from(in, at, arrays.count, arrays.aligned_in));
    });
    owner = owner + 1 == regions.size ? 0 : owner + 1;
  }
  if (!exchange_flags(regions, number)) return false;
  ++number;
  each(regions.rank, [&](unsigned i, size_t) {
    send(regions, number, i, reduce_slots<T>(regions, number - 1, i, arrays.op));
  });
  if (!exchange_flags(regions, number)) return false;
  for (unsigned source = 0; source < regions.size; ++source)
    each(source, [&](unsigned i, size_t at) {
      store_to(out, at, load_pack(slot<T>(regions, regions.rank, source, number) + i), arrays.count,
               arrays.aligned_out);
    });
  return true;
}

template <class T, bool kTwoShot>
__global__ void __launch_bounds__(kThreads, 1)  // without the 1, ptxas spills
    all_reduce_symmetric(const __grid_constant__ Regions regions, const T* in, T* out,
                         const __grid_constant__ Arrays arrays) {
  const size_t span = size_t{arrays.piece} * (kTwoShot ? regions.size : 1);
  unsigned number = gpu::load(&state_of(regions, regions.rank).number);
  for (size_t begin = blockIdx.x * span; begin < arrays.count; begin += gridDim.x * span) {
    const bool done = kTwoShot ? two_shot(regions, arrays, in, out, begin, number)
                               : one_shot(regions, arrays, in, out, begin, number);
    if (!done) return;
  }
  if (threadIdx.x == 0) gpu::store(&state_of(regions, regions.rank).number, number);
}

class CudaSymmetricDevice final : public device::SymmetricDevice {
 public:
  explicit CudaSymmetricDevice(int index) : index_(index) {}

  size_t region_bytes(int size) override {
    return kStateBytes + size_t{2} * static_cast<size_t>(size) * kMostBlocks * kSliceBytes;
  }
  device::MemoryHandle export_memory(void* memory) override {
    const OnDevice on({.device = index_});
    cudaIpcMemHandle_t handle{};
    check_peer(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
    device::MemoryHandle bytes{};
    static_assert(sizeof handle == sizeof bytes);
    memcpy(bytes.data(), &handle, sizeof handle);
    return bytes;
  }
  void* import_memory(const device::MemoryHandle& bytes) override {
    const OnDevice on({.device = index_});
    cudaIpcMemHandle_t handle{};
    memcpy(&handle, bytes.data(), sizeof handle);
    void* memory = nullptr;
    check_peer(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
    return memory;
  }
  void close_import(void* memory) noexcept override {
    try {
      const OnDevice on({.device = index_});
      (void)cudaIpcCloseMemHandle(memory);
    } catch (const Error&) {  // at the end of a process there may be no driver any more
    }
  }
  void enable_access(int device) override {
    const OnDevice on({.device = index_});
    const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
      return;
    }
    check_peer(error, "cudaDeviceEnablePeerAccess");
  }
  void all_reduce(const device::SymmetricRegions& at, const device::SymmetricAllReduce& call,
                  void* stream) override;

 private:
  // A device without peer access is no error of CUDA: the caller uses another algorithm.
  static void check_peer(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    throw Unsupported(std::string(what) + ": " + cudaGetErrorString(error));
  }

  int index_;
};

void CudaSymmetricDevice::all_reduce(const device::SymmetricRegions& at,
                                     const device::SymmetricAllReduce& call, void* stream) {
  check_defined(call.dtype, call.op);
  check(!at.by_rank.empty() && at.by_rank.size() <= kMostRanks, "invalid number of regions");
  if (call.count == 0) return;
  const OnDevice on({.device = index_});
  Regions regions{.of = {},
                  .aborted = at.aborted,
                  .rank = static_cast<unsigned>(at.rank),
                  .size = static_cast<unsigned>(at.by_rank.size())};
  std::copy(at.by_rank.begin(), at.by_rank.end(), regions.of);
  const size_t each = bytes_of(call.dtype), bytes = call.count * each;
  const bool two = bytes > device::kOneShotBytes;
  const size_t pieces = std::min(at.blocks, kMostBlocks) * (two ? at.by_rank.size() : 1);
  const size_t even = ((bytes + pieces - 1) / pieces + kLine - 1) / kLine * kLine;
  const size_t piece = std::min(even, kSliceBytes), span = piece * (two ? at.by_rank.size() : 1);
  const size_t blocks =
      std::min<size_t>((bytes + span - 1) / span, std::min(at.blocks, kMostBlocks));
  const Arrays arrays{.count = call.count,
                      .piece = static_cast<unsigned>(piece / each),
                      .op = call.op,
                      .aligned_in = is_aligned(call.input, 16),
                      .aligned_out = is_aligned(call.output, 16)};
  const gpu::Launch shape{.blocks = static_cast<unsigned>(blocks),
                          .threads = kThreads,
                          .stream = static_cast<cudaStream_t>(stream),
                          .waits_for_peers = true};
  with_any(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* in = static_cast<const T*>(call.input);
    auto* out = static_cast<T*>(call.output);
    if (two)
      launch("all_reduce_symmetric", all_reduce_symmetric<T, true>, shape, regions, in, out,
             arrays);
    else
      launch("all_reduce_symmetric", all_reduce_symmetric<T, false>, shape, regions, in, out,
             arrays);
  });
}

}  // namespace

std::shared_ptr<device::SymmetricDevice> open_symmetric_device(int index) {
  return std::make_shared<CudaSymmetricDevice>(index);
}

void load_symmetric(int device) {
  const OnDevice on({.device = device});
  for (size_t dtype = 0; dtype < kDtypes.size(); ++dtype)
    with_any(static_cast<Dtype>(dtype), [](auto type) {
      using T = typename decltype(type)::type;
      for (const auto kernel : {all_reduce_symmetric<T, false>, all_reduce_symmetric<T, true>}) {
        cudaFuncAttributes found{};
        check_cuda(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)),
                   "cudaFuncGetAttributes");
      }
    });
}

}  // namespace pycomm::cuda
