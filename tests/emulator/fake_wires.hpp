// The connections of a fake NCCL communicator: sockets between threads or processes of one machine,
// and one message over them.
//
// Stricter than NCCL: a send ends only when its receive has taken all of it, and both must agree on
// the contents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/nccl.h"

namespace fake_nccl {

enum class Kind : uint32_t { message, all_reduce, all_gather, reduce_scatter, broadcast };

// What precedes every message; both sides must agree on all of it.
struct Header {
  Kind kind{};
  pycomm::nccl::NcclDtype dtype{};
  pycomm::nccl::NcclOp op{};
  int32_t root = 0;
  uint64_t count = 0;
  bool operator==(const Header&) const = default;
};
std::string text(const Header& header);

struct Failed : std::runtime_error {
  pycomm::nccl::NcclResult result;
  Failed(pycomm::nccl::NcclResult r, const std::string& what)
      : std::runtime_error(what), result(r) {}
};

// A socket for each direction with each peer, so that both can be in flight.
class Wires {
 public:
  Wires(int size, int rank) : size_(size), rank_(rank) {}
  ~Wires();
  Wires(const Wires&) = delete;
  Wires& operator=(const Wires&) = delete;

  // Connects to all ranks, each with its own device. Blocks; `given_up` ends that. Throws Failed.
  void connect(const pycomm::nccl::NcclId& id, int device, const std::function<bool()>& given_up);
  void hang_up();

  int size() const { return size_; }
  int rank() const { return rank_; }

 private:
  friend class Transfer;
  int size_, rank_;
  std::vector<int> out_, in_;  // by peer; nothing for oneself
};

// One message, sent or received. step() does what can be done without waiting.
class Transfer {
 public:
  Transfer(Header header, int peer, std::byte* data, size_t bytes, bool sends)
      : header_(header), peer_(peer), data_(data), bytes_(bytes), sends_(sends) {}
  // True when the whole message has moved. Throws Failed: a mismatch, or a peer that has gone.
  bool step(Wires& wires);
  int peer() const { return peer_; }
  bool sends() const { return sends_; }

 private:
  enum class Stage : uint8_t { header, answer, payload, over };
  bool move(int fd, void* at, size_t bytes, bool out);
  void judge(const Wires& wires);

  Header header_, seen_{};
  int peer_;
  std::byte* data_;
  size_t bytes_;
  bool sends_;
  char answer_ = 0;
  Stage stage_ = Stage::header;
  size_t done_ = 0;  // bytes of this stage
};

}  // namespace fake_nccl
