// NVIDIA's collective library as the stream engine sees it: a pure interface, so that a fake can
// stand in where there is no GPU, and the few types of its C interface that cross it.
//
// No header of NCCL or CUDA is needed: the library is opened at run time (load_nccl) and never
// linked. Enumerators have NCCL's numbers; tests/test_nccl.py holds them to nccl.h. Called by
// bindings/cuda.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace pycomm {

struct NcclComm;  // a communicator; only who made it looks inside

// What rank 0 makes and every rank of a communicator must be given.
struct NcclId {
  std::array<char, 128> bytes;
};

enum class NcclResult : int32_t {
  success,
  cuda_error,
  system_error,
  internal_error,
  invalid_argument,
  invalid_usage,
  remote_error,
  in_progress,  // of a communicator that does not block: ask comm_async_error again
  timeout,
};

enum class NcclDtype : int32_t {
  int8,
  uint8,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  float32,
  float64,
  bfloat16,
};

enum class NcclOp : int32_t { sum, product, max, min, avg };

// What a call reads and writes, on the device. `count` is what a rank gives in all_gather and what
// it gets in reduce_scatter; elsewhere both are as long. send has no `out` and recv no `in`; `out`
// may be `in` in all_reduce and broadcast.
struct NcclData {
  const void* in;
  void* out;
  size_t count;
  NcclDtype dtype;
};

// Where a call runs: a communicator, and a stream (a cudaStream_t) of its device.
struct NcclQueue {
  NcclComm* comm;
  void* stream;
};

// Any thread may call, one at a time for a communicator. The device of a communicator is the
// thread's current one when it is made. A call of send to broadcast enqueues and returns; between
// group_start and group_end it is only noted, by thread, and group_end enqueues all as one.
class NcclApi {
 public:
  NcclApi() = default;
  NcclApi(const NcclApi&) = delete;
  NcclApi& operator=(const NcclApi&) = delete;
  virtual ~NcclApi() = default;

  virtual int version() const = 0;         // as NCCL codes it: 23203
  virtual std::string origin() const = 0;  // the file that it was loaded from
  virtual std::string error_string(NcclResult result) = 0;
  virtual std::string last_error(NcclComm* comm) = 0;  // more words, or none; comm may be null

  virtual NcclResult get_unique_id(NcclId& id) = 0;
  // Waits for all ranks, unless `blocking` is false: then `comm` is in progress for a while.
  virtual NcclResult comm_init_rank(NcclComm*& comm, int size, const NcclId& id, int rank,
                                    bool blocking) = 0;
  virtual NcclResult comm_finalize(NcclComm* comm) = 0;
  virtual NcclResult comm_destroy(NcclComm* comm) = 0;
  virtual NcclResult comm_abort(
      NcclComm* comm) = 0;  // ends what is under way, and the communicator
  virtual NcclResult comm_async_error(NcclComm* comm, NcclResult& error) = 0;

  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;
  virtual NcclResult send(NcclData data, int peer, NcclQueue queue) = 0;
  virtual NcclResult recv(NcclData data, int peer, NcclQueue queue) = 0;
  virtual NcclResult all_reduce(NcclData data, NcclOp op, NcclQueue queue) = 0;
  virtual NcclResult all_gather(NcclData data, NcclQueue queue) = 0;
  virtual NcclResult reduce_scatter(NcclData data, NcclOp op, NcclQueue queue) = 0;
  virtual NcclResult broadcast(NcclData data, int root, NcclQueue queue) = 0;
};

// 23203 as "2.32.3".
std::string nccl_version_text(int code);

// What a result of `function` means, with NCCL's own words and which library said it.
std::string nccl_error_text(NcclApi& nccl, const std::string& function, NcclResult result,
                            NcclComm* comm);

// Where the library may be.
struct NcclPlace {
  std::string what;  // in words: "the package nvidia-nccl-cu13"
  std::string file;  // what dlopen takes; empty: known not to be there
  bool loaded_only;  // only if this process has it loaded already
};

// The first of these that has all that is needed; it stays loaded. Throws Unsupported where there
// is none: what was wrong at each place, and what to install.
std::unique_ptr<NcclApi> load_nccl(std::span<const NcclPlace> places);

}  // namespace pycomm
