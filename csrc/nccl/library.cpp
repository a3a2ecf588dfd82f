// Implements NcclApi with the NCCL library, and searches for that library.
#include <link.h>

#include <tuple>

#include "core/errors.h"
#include "nccl/abi.h"
#include "nccl/nccl.h"

namespace pycomm::nccl {
namespace {

struct Close {
  void operator()(void* library) const { dlclose(library); }
};
using Opened = std::unique_ptr<void, Close>;

// The file of a library that the linker may have found by name.
std::string file_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0 || map == nullptr) return {};
  return map->l_name;
}

abi::Config config_of(NcclOptions options) {
  abi::Config config;
  config.blocking = options.blocking ? 1 : 0;
  if (options.max_ctas > 0) config.max_ctas = options.max_ctas;
  return config;
}

class Library final : public NcclApi {
 public:
  explicit Library(abi::Functions functions, int version)
      : call_(functions), version_(version), origin_(file_of(functions.handle)) {}

  int version() const override { return version_; }
  std::string origin() const override { return origin_; }
  std::string error_string(NcclResult result) override { return call_.get_error_string(result); }
  std::string last_error() override {
    const char* text = call_.get_last_error(nullptr);
    return text == nullptr ? "" : text;
  }

  NcclResult get_unique_id(NcclId& id) override { return call_.get_unique_id(&id); }
  NcclResult comm_init_rank(NcclComm*& comm, int size, const NcclId& id, int rank,
                            NcclOptions options) override {
    abi::Config config = config_of(options);
    config.split_share = 1;
    return call_.comm_init_rank_config(&comm, size, id, rank, &config);
  }
  NcclResult comm_split(NcclComm* parent, int rank, NcclComm*& child,
                        NcclOptions options) override {
    abi::Config config = config_of(options);
    return call_.comm_split(parent, 0, rank, &child, &config);
  }
  NcclResult comm_destroy(NcclComm* comm) override { return call_.comm_destroy(comm); }
  NcclResult comm_abort(NcclComm* comm) override { return call_.comm_abort(comm); }
  NcclResult comm_async_error(NcclComm* comm, NcclResult& error) override {
    return call_.comm_get_async_error(comm, &error);
  }

  NcclResult group_start() override { return call_.group_start(); }
  NcclResult group_end() override { return call_.group_end(); }
  NcclResult send(NcclData d, int peer, NcclQueue q) override {
    return call_.send(d.in, d.count, d.dtype, peer, q.comm, q.stream);
  }
  NcclResult recv(NcclData d, int peer, NcclQueue q) override {
    return call_.recv(d.out, d.count, d.dtype, peer, q.comm, q.stream);
  }
  NcclResult all_reduce(NcclData d, NcclOp op, NcclQueue q) override {
    return call_.all_reduce(d.in, d.out, d.count, d.dtype, op, q.comm, q.stream);
  }
  NcclResult all_gather(NcclData d, NcclQueue q) override {
    return call_.all_gather(d.in, d.out, d.count, d.dtype, q.comm, q.stream);
  }
  NcclResult reduce_scatter(NcclData d, NcclOp op, NcclQueue q) override {
    return call_.reduce_scatter(d.in, d.out, d.count, d.dtype, op, q.comm, q.stream);
  }
  NcclResult broadcast(NcclData d, int root, NcclQueue q) override {
    return call_.broadcast(d.in, d.out, d.count, d.dtype, root, q.comm, q.stream);
  }

 private:
  const abi::Functions call_;
  const int version_;
  const std::string origin_;
};

// An unsuitable library is closed: left open, the linker would find it by the same name at the next
// place. A suitable one stays open permanently, as its threads and handlers outlive every
// communicator.
std::unique_ptr<NcclApi> open(const NcclPlace& place) {
  if (place.file.empty()) throw Unsupported("not installed");
  const int flags = RTLD_NOW | RTLD_LOCAL | (place.loaded_only ? RTLD_NOLOAD : 0);
  Opened library(dlopen(place.file.c_str(), flags));
  if (!library) {
    const char* why = dlerror();
    throw Unsupported(place.loaded_only || why == nullptr ? "none" : why);
  }
  int (*get_version)(int*) = abi::symbol(library.get(), "ncclGetVersion");
  int version = 0;
  const int result = get_version(&version);
  if (result != 0) throw Unsupported("ncclGetVersion returned " + std::to_string(result));
  if (version < abi::kLeastVersion)
    throw Unsupported(file_of(library.get()) + " is NCCL " + nccl_version_text(version));
  auto found = std::make_unique<Library>(abi::Functions{library.get()}, version);
  std::ignore = library.release();
  return found;
}

}  // namespace

std::string nccl_version_text(int code) {
  // Up to 2.8 the code has one digit for the minor number.
  const int major_unit = code < 10000 ? 1000 : 10000;
  return std::to_string(code / major_unit) + "." + std::to_string(code % major_unit / 100) + "." +
         std::to_string(code % 100);
}

std::string nccl_error_text(NcclApi& nccl, const std::string& function, NcclResult result) {
  const std::string more = nccl.last_error();
  return function + ": " + nccl.error_string(result) + (more.empty() ? "" : ": " + more) +
         " (NCCL " + nccl_version_text(nccl.version()) + ", " + nccl.origin() + ")";
}

void create_id(NcclApi& nccl, NcclId& id) {
  if (const NcclResult made = nccl.get_unique_id(id); made != NcclResult::success)
    throw InternalError(nccl_error_text(nccl, "ncclGetUniqueId", made));
}

std::unique_ptr<NcclApi> load_nccl(std::span<const NcclPlace> places) {
  std::string seen;
  for (const NcclPlace& place : places) {
    try {
      return open(place);
    } catch (const Unsupported& why) {
      seen += (seen.empty() ? "" : "; ") + place.what + ": " + why.what();
    }
  }
  throw Unsupported("NCCL " + nccl_version_text(abi::kLeastVersion) + " or newer was not found (" +
                    seen + "); pip install nvidia-nccl-cu13");
}

}  // namespace pycomm::nccl
