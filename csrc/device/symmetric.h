// All-reduce over symmetric memory: a region of the same layout on the GPU of each rank of a host,
// which all ranks map. cuda/symmetric.cu implements it; device_group/symmetric_memory.h sets it up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace pycomm::device {

inline constexpr int kMostSymmetricRanks = 16;

// Up to this many bytes each rank sends its whole array to every rank (one-shot). Above, ranks
// reduce a part each and send that (two-shot). Not measured yet.
inline constexpr size_t kOneShotBytes = size_t{256} << 10;

// The regions, as one rank maps them.
struct SymmetricRegions {
  std::vector<std::byte*> by_rank{};  // aligned to 256 bytes, zero before the first call
  int rank = 0;
  unsigned blocks = 0;                // of a launch at most, equal on all ranks
  const uint32_t* aborted = nullptr;  // of Device::allocate_host(); not 0: waiting ends
};

// out[i] = (input of rank 0)[i] (+) (input of rank 1)[i] (+) ..., with the bits of
// Device::reduce(). All ranks call with equal values except the arrays. `input` may be `output`,
// and must not overlap it otherwise; elements are aligned to their size.
struct SymmetricAllReduce {
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
};

// Names device memory to other processes of the host.
using MemoryHandle = std::array<char, 64>;

// Of one device. Thread-safe. Errors as of Device.
class SymmetricDevice {
 public:
  SymmetricDevice() = default;
  SymmetricDevice(const SymmetricDevice&) = delete;
  SymmetricDevice& operator=(const SymmetricDevice&) = delete;
  virtual ~SymmetricDevice() = default;

  virtual size_t region_bytes(int size) = 0;
  // `memory`: of Device::allocate(). It must stay allocated while another process maps it.
  virtual MemoryHandle export_memory(void* memory) = 0;
  // Maps the memory of another process. Throws Unsupported if the devices have no peer access.
  virtual void* import_memory(const MemoryHandle& handle) = 0;
  virtual void close_import(void* memory) noexcept = 0;  // no stream may use it
  // Lets this device use memory of another device of this process. Throws Unsupported.
  virtual void enable_access(int device) = 0;
  // Enqueues one kernel, which waits for those of all ranks. Calls on the same regions must be
  // ordered by streams. After `*aborted` was set, the kernel ends without a result.
  virtual void all_reduce(const SymmetricRegions& regions, const SymmetricAllReduce& call,
                          void* stream) = 0;
};

}  // namespace pycomm::device
