// A channel through memory that both ranks see: a ring of bytes for each direction and a wake-up
// socket.
//
// Each ring has one writer and one reader. A rank that sleeps says so in the ring; the rank that
// moves the ring then sends one byte on the stream socket. The kernel closes the socket when a rank
// dies. A goodbye message for which a full ring has no space is sent on the socket too. local.cpp
// and shm.cpp differ only in how two ranks come to hold the same rings.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "os/fd.h"
#include "os/shared_memory.h"
#include "transport/transport.h"

namespace pycomm {

// The first page of a ring. Positions count bytes since the start and never wrap.
struct RingHead {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_sleeps;
};

// What a peer gives to be mapped, beside the rings.
struct PeerMemory {
  std::shared_ptr<std::byte> memory;
  HeapView heap;
};

class RingChannel final : public Channel {
 public:
  RingChannel(std::string_view transport, std::shared_ptr<RingMemory> in,
              std::shared_ptr<RingMemory> out, Fd wakeup_socket, PeerMemory peer_memory = {});

  std::string_view transport() const override { return transport_; }
  size_t send(ConstBytes head, ConstBytes body) override;
  ConstBytes peek(size_t want) override;
  void take(size_t bytes) override;
  size_t receive(Bytes into) override;
  bool is_closed() const override { return closed_; }
  std::string_view protocol_error() const override {
    return corrupt_ ? "its ring of shared memory holds more than fits into it" : "";
  }
  pollfd arm(Want want) override;
  void disarm(short revents) override;
  void close(ConstBytes unsent) override;
  void wake_peer() override;
  std::shared_ptr<std::byte> memory() const override { return peer_memory_.memory; }
  HeapView heap() const override { return peer_memory_.heap; }

 private:
  RingHead& in() const { return *reinterpret_cast<RingHead*>(in_->head()); }
  RingHead& out() const { return *reinterpret_cast<RingHead*>(out_->head()); }
  size_t put(ConstBytes bytes);
  void wake_if_sleeping(std::atomic<uint32_t>& sleeps);
  void send_goodbye(ConstBytes unsent);
  void drain_wakeup(ConstBytes bytes);
  void append_goodbye();

  std::string_view transport_;
  std::shared_ptr<RingMemory> in_, out_;
  Fd wakeup_socket_;
  PeerMemory peer_memory_;
  uint64_t written_ = 0, read_ = 0;   // our own ends; the shared copies are for the peer
  uint64_t peer_read_ = 0;            // the last we saw of the peer's
  std::vector<std::byte> goodbye_;    // received on the wake-up socket
  std::vector<std::byte> remaining_;  // replaces the ring, once the peer is gone and left a goodbye
  size_t remaining_taken_ = 0;
  bool closed_ = false, corrupt_ = false;
};

}  // namespace pycomm
