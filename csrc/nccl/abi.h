// NCCL's C interface: its functions, found in a library opened with dlopen, and the structure that
// it reads. Other code uses nccl.h. tests/devices/test_nccl.py compiles it against NCCL's header.
#pragma once

#include <dlfcn.h>

#include <limits>
#include <string>

#include "core/errors.h"
#include "nccl/nccl.h"

namespace pycomm::nccl::abi {

// 2.18.1 is the first version with ncclCommSplit and splitShare. Everything else is older.
inline constexpr int kLeastVersion = 21801;

// ncclConfig_t of 2.18. Later versions only add members, and use their defaults for a `version`
// that lacks them.
inline constexpr int kUndefined = std::numeric_limits<int>::min();
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kLeastVersion;
  int blocking = 1;
  int cga_cluster_size = kUndefined, min_ctas = kUndefined, max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = 0;
};

// Converts to the function type that it is assigned to.
struct Symbol {
  void* address;
  template <class F>
  operator F*() const {
    return reinterpret_cast<F*>(address);
  }
};

// Throws Unsupported if the library lacks the function.
inline Symbol symbol(void* library, const char* name) {
  void* address = dlsym(library, name);
  if (address == nullptr) throw Unsupported(std::string("it has no ") + name);
  return {address};
}

using Result = NcclResult;
using Comm = NcclComm*;
using Dtype = NcclDtype;
using Op = NcclOp;
using Stream = void*;

struct Functions {
  void* handle;  // from dlopen
  Result (*get_version)(int*) = symbol(handle, "ncclGetVersion");
  const char* (*get_error_string)(Result) = symbol(handle, "ncclGetErrorString");
  const char* (*get_last_error)(Comm) = symbol(handle, "ncclGetLastError");
  Result (*get_unique_id)(NcclId*) = symbol(handle, "ncclGetUniqueId");
  Result (*comm_init_rank_config)(Comm*, int, NcclId, int,
                                  Config*) = symbol(handle, "ncclCommInitRankConfig");
  Result (*comm_split)(Comm, int, int, Comm*, Config*) = symbol(handle, "ncclCommSplit");
  Result (*comm_destroy)(Comm) = symbol(handle, "ncclCommDestroy");
  Result (*comm_abort)(Comm) = symbol(handle, "ncclCommAbort");
  Result (*comm_get_async_error)(Comm, Result*) = symbol(handle, "ncclCommGetAsyncError");
  Result (*group_start)() = symbol(handle, "ncclGroupStart");
  Result (*group_end)() = symbol(handle, "ncclGroupEnd");
  Result (*send)(const void*, size_t, Dtype, int, Comm, Stream) = symbol(handle, "ncclSend");
  Result (*recv)(void*, size_t, Dtype, int, Comm, Stream) = symbol(handle, "ncclRecv");
  Result (*all_reduce)(const void*, void*, size_t, Dtype, Op, Comm,
                       Stream) = symbol(handle, "ncclAllReduce");
  Result (*all_gather)(const void*, void*, size_t, Dtype, Comm, Stream) = symbol(handle,
                                                                                 "ncclAllGather");
  Result (*reduce_scatter)(const void*, void*, size_t, Dtype, Op, Comm,
                           Stream) = symbol(handle, "ncclReduceScatter");
  Result (*broadcast)(const void*, void*, size_t, Dtype, int, Comm,
                      Stream) = symbol(handle, "ncclBroadcast");
};

}  // namespace pycomm::nccl::abi
