// A pure interface to NCCL for the stream engine, so that a fake can replace it without a GPU, and
// the types of NCCL's C interface that it needs.
//
// It needs no header of NCCL or CUDA: the library is opened at run time (load_nccl) and never
// linked. Enumerators have NCCL's numbers; tests/devices/test_nccl.py checks them against nccl.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace pycomm::nccl {

struct NcclComm;  // an opaque communicator

// Created by rank 0 and passed to every rank of a communicator.
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
  in_progress,  // of a nonblocking communicator: poll comm_async_error
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

// The device arrays of a call. `count` is one rank's input in all_gather and one rank's output in
// reduce_scatter; elsewhere both have that size. send has no `out` and recv no `in`. `out` may
// equal `in` in all_reduce and broadcast.
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

// Of a communicator. `max_ctas`: thread blocks of a call, at most; 0: NCCL's choice.
struct NcclOptions {
  bool blocking = true;
  int max_ctas = 0;
};

// Any thread may call, one at a time for each communicator. A communicator's device is the thread's
// current one at creation. The calls from send to broadcast enqueue and return. Between group_start
// and group_end they are only recorded, per thread, and group_end enqueues them as one.
class NcclApi {
 public:
  NcclApi() = default;
  NcclApi(const NcclApi&) = delete;
  NcclApi& operator=(const NcclApi&) = delete;
  virtual ~NcclApi() = default;

  virtual int version() const = 0;         // NCCL's code, such as 23203
  virtual std::string origin() const = 0;  // the file it was loaded from
  virtual std::string error_string(NcclResult result) = 0;
  virtual std::string last_error() = 0;  // details of the process's last error, or empty

  virtual NcclResult get_unique_id(NcclId& id) = 0;
  // Waits for all ranks unless `options.blocking` is false: then `comm` is in progress at first.
  virtual NcclResult comm_init_rank(NcclComm*& comm, int size, const NcclId& id, int rank,
                                    NcclOptions options) = 0;
  // Sets `child` to a communicator of the same ranks, which shares the resources and the abort of
  // `parent`. If that is nonblocking, it is in progress until `child` is set.
  virtual NcclResult comm_split(NcclComm* parent, int rank, NcclComm*& child,
                                NcclOptions options) = 0;
  virtual NcclResult comm_destroy(NcclComm* comm) = 0;  // once its calls are complete
  // Cancels calls in progress, then destroys the communicator.
  virtual NcclResult comm_abort(NcclComm* comm) = 0;
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

// Describes a result of `function`, with NCCL's message and the library.
std::string nccl_error_text(NcclApi& nccl, const std::string& function, NcclResult result);

// Throws InternalError.
void create_id(NcclApi& nccl, NcclId& id);

// A possible place of the library.
struct NcclPlace {
  std::string what;  // description: "the package nvidia-nccl-cu13"
  std::string file;  // argument of dlopen; empty: known to be absent
  bool loaded_only;  // only if already loaded in this process
};

// Loads the first suitable library, permanently. Throws Unsupported if there is none, with the
// reason for each place and what to install.
std::unique_ptr<NcclApi> load_nccl(std::span<const NcclPlace> places);

}  // namespace pycomm::nccl
