// Data of a stream that other ranks send and receive through host memory. Messages are staged in
// host memory that the device reads and writes; a host transport sends and receives them.
//
// Long messages are copied in pieces, so that the copies and the transport work at the same time:
//
//   stream             copy 0 | call | copy 1 | call | ...  other work  ... | wait for the end
//   callback thread            exchange: send 0 | send 1, receive 0 | receive 1
//   copy-back stream                                wait | copy 0 back | wait | copy 1 back
//
// Pieces are of this rank only. The transport sends and receives whole messages, so that peers need
// not agree about pieces, and the copies never wait for a peer.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/message_progress.h"
#include "device/device.h"
#include "device/growable_buffer.h"
#include "device/host_callback_thread.h"

namespace pycomm::device {

// A message to `peer`, or from it. Where `data` is stored depends on the function.
struct PeerMessage {
  int peer;
  bool sends;
  std::byte* data;
  size_t bytes;
};

// Exchanges messages between arrays in host memory. One staging channel owns it.
class HostTransport {
 public:
  HostTransport() = default;
  HostTransport(const HostTransport&) = delete;
  HostTransport& operator=(const HostTransport&) = delete;
  virtual ~HostTransport() = default;
  // Exchanges all messages concurrently; those of one peer in order. Sends what is ready. Throws
  // errors that end the group.
  virtual void exchange(std::span<const PeerMessage> messages, std::chrono::nanoseconds timeout,
                        MessageProgress& progress) = 0;
  // Thread-safe. Ends the current exchange, here and on the peers.
  virtual void abort(const std::string& reason) noexcept = 0;
  virtual void close() noexcept = 0;  // no exchange may be in progress
};

class HostStagingChannel {
 public:
  // A piece costs a call to the host and a wait of the stream, about 30 us: a fifth of the 170 us
  // in which a link of 100 Gbit/s sends it. A GPU copies it in 80 us.
  static constexpr size_t kPieceBytes = size_t{2} << 20;

  // `piece_bytes`: a multiple of 128. Messages above 64 times that have 64 pieces.
  HostStagingChannel(std::shared_ptr<Device> device, void* stream,
                     std::unique_ptr<HostTransport> transport, size_t piece_bytes = kPieceBytes);
  ~HostStagingChannel();  // aborts a running exchange
  HostStagingChannel(const HostStagingChannel&) = delete;
  HostStagingChannel& operator=(const HostStagingChannel&) = delete;

  // Host memory that a message of `bytes` takes.
  static size_t staged_bytes(size_t bytes);
  // Call it before begin(): ensures that much host memory. Throws Unsupported if it would have to
  // grow while `caller`, a stream, is being captured.
  void reserve(size_t bytes, void* caller) { staging_.reserve(bytes, caller); }

  // The arrays of `messages` are on the device. Received data is visible to work enqueued after
  // end(). Work that need not wait is enqueued between the two. Not thread-safe.
  void begin(std::span<const PeerMessage> messages, std::chrono::nanoseconds timeout);
  // The same for other work on memory(), which has no pieces. It throws as exchange() does.
  void begin(std::function<void()> body);
  void end();
  std::byte* memory() const { return staging_.data(); }  // that reserve() ensures

  // Thread-safe. The error of a failed exchange; set before the stream continues without the
  // messages.
  std::optional<Error> async_error();
  void abort(const std::string& reason) noexcept;
  void close() noexcept { transport_->close(); }

 private:
  class Exchange;
  void run(const std::function<void()>& body) noexcept;

  std::shared_ptr<Device> device_;
  void* stream_;
  std::unique_ptr<HostTransport> transport_;
  const size_t piece_bytes_;
  GrowableBuffer staging_;
  Stream copy_back_stream_;
  Event first_piece_, copied_back_;
  std::shared_ptr<Exchange> current_;  // of the current begin() with messages
  std::mutex mutex_;                   // guards error_
  std::optional<Error> error_;         // the first one
  HostCallbackThread callbacks_;       // the last member, because its thread uses the others
};

}  // namespace pycomm::device
