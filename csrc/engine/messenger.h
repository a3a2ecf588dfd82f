// Sends and receives messages between two ranks.
#pragma once

#include <span>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "core/message_progress.h"
#include "engine/call_sequence.h"
#include "engine/frame_dispatcher.h"
#include "engine/mailbox.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class Engine;

// One of the messages of an exchange().
struct MessageRequest {
  int peer = 0;
  transport::Header signature{};  // as for send() and receive()
  bool sends = false;
  transport::ConstBytes out{};  // data to send
  transport::Bytes into{};      // or buffer to receive into
};

// Which of several receives is complete, and the sender of its message.
struct Received {
  size_t index = 0;
  int from = collectives::kNoRank;
};

class Messenger {
 public:
  Messenger(Engine& engine, const PeerTable& peers, const CallSequence& calls, Mailbox& mailbox,
            FrameDispatcher& dispatcher)
      : engine_(engine), peers_(peers), calls_(calls), mailbox_(mailbox), dispatcher_(dispatcher) {}

  // Of Mailbox.
  void set_waiting(std::function<std::vector<Awaited>()> waiting) {
    mailbox_.set_waiting(std::move(waiting));
  }
  void detach(const std::byte* into) { mailbox_.detach(into); }
  void send(int to, const transport::Header& signature, transport::ConstBytes bytes,
            const Deadline& deadline);
  // `from` may be kAnyPeer. Returns the sender. Throws Mismatch, and drops the message, if its
  // dtype or count differs.
  int receive(int from, const transport::Header& signature, transport::Bytes into,
              const Deadline& deadline);
  // Waits for the first message of several receives; `received.index`: the one that errors name.
  // False if StopSignal::suspend() ended the wait; a later call continues it. Until then the
  // memory of all receives must stay valid. Throws Mismatch as receive() does, for the receive that
  // `received` names.
  bool receive_any(std::span<const Awaited> receives, Received& received, const Deadline& deadline);
  // All concurrently; messages of one peer in order. No receive may name kAnyPeer. Throws Mismatch
  // as receive() does, after all other messages are complete. `progress`: null if the data of all
  // sends is complete, and no other thread reads received data.
  void exchange(std::span<const MessageRequest> messages, MessageProgress* progress,
                const Deadline& deadline);
  // Replaces send() for an array on a device: sends no payload and returns when the receiver, whose
  // receive() has no bytes either, accepted the message. Throws Mismatch, as receive() does there,
  // if the receiver expects a different message, and if both ranks announce at the same time, which
  // would be a deadlock.
  void announce_send(int to, const transport::Header& signature, const Deadline& deadline);
  // Replaces exchange() for arrays on devices: announces all sends, answers all receives, and
  // returns when each message is agreed about or refused. A peer may list its messages in another
  // order, or make single calls. Messages with one peer, direction and tag match in order.
  // `agreed`: the messages that both ends accepted, by index. For each peer, those that this rank
  // receives are in the order of its answers, and those that it sends in the order of the peer's
  // answers. Set also before a Mismatch: these messages must be sent nevertheless.
  void agree(std::span<const MessageRequest> messages, std::vector<size_t>& agreed,
             const Deadline& deadline);

 private:
  Message await(int& from, const transport::Header& wanted, transport::Bytes into,
                const transport::Header& signature, const Deadline& deadline);
  void accept(int from, const Message& message, const transport::Header& signature,
              transport::Bytes into, const Deadline& deadline);
  Mismatch refused_receive(int from, const transport::Header& theirs,
                           const transport::Header& mine) const;
  Mismatch refused_send(int to, const transport::Header& signature,
                        const transport::Header& answer) const;

  Engine& engine_;
  const PeerTable& peers_;
  const CallSequence& calls_;
  Mailbox& mailbox_;
  FrameDispatcher& dispatcher_;
};

}  // namespace pycomm::engine
