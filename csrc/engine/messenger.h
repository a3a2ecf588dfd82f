// Sends and receives messages between two ranks.
#pragma once

#include <mutex>
#include <span>

#include "core/deadline.h"
#include "engine/call_sequence.h"
#include "engine/frame_dispatcher.h"
#include "engine/frame_sender.h"
#include "engine/mailbox.h"
#include "engine/peer_table.h"
#include "engine/task_runner.h"

namespace pycomm::engine {

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
  // `turn` is held by the thread that uses the links.
  Messenger(std::mutex& turn, const PeerTable& peers, const CallSequence& calls, Mailbox& mailbox,
            FrameSender& sender, FrameDispatcher& dispatcher, TaskRunner& runner)
      : turn_(turn),
        peers_(peers),
        calls_(calls),
        mailbox_(mailbox),
        sender_(sender),
        dispatcher_(dispatcher),
        runner_(runner) {}

  // As the methods of Engine.
  void send(int to, const transport::Header& signature, transport::ConstBytes bytes,
            const Deadline& deadline);
  int receive(int from, const transport::Header& signature, transport::Bytes into,
              const Deadline& deadline);
  bool receive_any(std::span<const Awaited> receives, Received& received, const Deadline& deadline);
  void exchange(std::span<const MessageRequest> messages, const Deadline& deadline);
  void announce_send(int to, const transport::Header& signature, const Deadline& deadline);

 private:
  Message await(int& from, const transport::Header& wanted, transport::Bytes into,
                const transport::Header& signature, const Deadline& deadline);
  void accept(int from, const Message& message, const transport::Header& signature,
              transport::Bytes into, const Deadline& deadline);
  [[noreturn]] void refuse(const RefusedMessage& message) const;

  std::mutex& turn_;
  const PeerTable& peers_;
  const CallSequence& calls_;
  Mailbox& mailbox_;
  FrameSender& sender_;
  FrameDispatcher& dispatcher_;
  TaskRunner& runner_;
};

}  // namespace pycomm::engine
