#include "engine/message_tasks.h"

#include <algorithm>
#include <vector>

namespace pycomm::engine {

bool SendMessage::advance() {
  if (!frame_open_) {
    const size_t frame = std::min(transport::kSegmentBytes, bytes_.size() - sent_);
    header_.bytes = static_cast<uint32_t>(frame);
    if (!sender_.open(to_, header_, bytes_.subspan(sent_, frame))) return false;
    frame_open_ = true;
  }
  const size_t pushed = sender_.push(to_);
  if (!sender_.over(to_)) return pushed > 0;
  frame_open_ = false;
  sent_ += header_.bytes;
  done_ = sent_ == bytes_.size();
  return true;
}

bool ReceiveMessage::advance() {
  message_ = dispatcher_.take_message(from_, wanted_);
  if (!message_ && from_ != kAnyPeer) dispatcher_.check_arrives(from_, wanted_);
  return message_.has_value();
}

// One message at a time to each peer, all peers concurrently: a slow peer delays no other.
bool ExchangeMessages::advance() {
  bool moved = false, left = false;
  std::vector<int> busy;
  for (SendMessage& one : sends_) {
    if (one.done() || std::ranges::count(busy, one.sending_to()) > 0) continue;
    moved |= one.advance();
    if (!one.done()) busy.push_back(one.sending_to());
    left |= !one.done();
  }
  if (!left) mailbox_.set_sending(false);  // from now on a notice may end the exchange
  return mailbox_.deliver_awaited([&](int& from, const transport::Header& wanted) {
    return dispatcher_.take_message(from, wanted);
  }) || moved;
}

int ExchangeMessages::sending_to() const {
  for (const SendMessage& one : sends_)
    if (!one.done()) return one.sending_to();
  return collectives::kNoRank;
}

}  // namespace pycomm::engine
