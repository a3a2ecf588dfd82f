#include "engine/message_tasks.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace pycomm::engine {

bool SendMessage::advance() {
  if (!frame_open_) {
    const size_t frame = std::min(transport::kSegmentBytes, bytes_.size() - sent_);
    if (ready_ && ready_() < sent_ + frame) return false;
    header_.bytes = static_cast<uint32_t>(frame);
    if (!sender_.open(to_, header_, bytes_.subspan(sent_, frame))) return false;
    frame_open_ = true;
  }
  const size_t pushed = sender_.push(to_);
  if (!sender_.is_sent(to_)) return pushed > 0;
  frame_open_ = false;
  sent_ += header_.bytes;
  done_ = sent_ == bytes_.size();
  return true;
}

ReceiveMessage::ReceiveMessage(FrameDispatcher& dispatcher, std::span<const Awaited> receives,
                               bool can_be_suspended)
    : dispatcher_(dispatcher), receives_(receives), can_be_suspended_(can_be_suspended) {
  if (receives.size() == 1) {
    first_.push_back(0);
    return;
  }
  std::set<uint32_t> tags;  // of the receives so far
  std::set<std::pair<int, uint32_t>> taken;
  for (size_t i = 0; i < receives.size(); ++i) {
    const auto tag = static_cast<uint32_t>(receives[i].signature.peer);
    const bool precedes =
        receives[i].from == kAnyPeer
            ? tags.contains(tag)
            : taken.contains({kAnyPeer, tag}) || taken.contains({receives[i].from, tag});
    if (!precedes) first_.push_back(i);
    tags.insert(tag);
    taken.insert({receives[i].from, tag});
  }
}

bool ReceiveMessage::advance() {
  for (const size_t i : first_) {
    sender_ = receives_[i].from;
    index_ = i;
    message_ = dispatcher_.take_message(sender_, receives_[i].signature);
    if (message_) return true;
    if (sender_ == kAnyPeer) continue;
    dispatcher_.check_arrives(sender_, receives_[i].signature);
    if (i > 0) dispatcher_.check_peers_needed(sender_, collectives::kNoRank);
  }
  return false;
}

ExchangeMessages::ExchangeMessages(FrameSender& sender, FrameDispatcher& dispatcher,
                                   Mailbox& mailbox, MessageProgress* progress)
    : sender_(sender), dispatcher_(dispatcher), mailbox_(mailbox), progress_(progress) {
  if (progress_ == nullptr) return;
  wake_.emplace();
  progress_->set_wake([this] { wake_->notify(); });
}

ExchangeMessages::~ExchangeMessages() {
  if (progress_ != nullptr) progress_->set_wake({});
}

void ExchangeMessages::send(int to, const transport::Header& header, transport::ConstBytes bytes,
                            size_t index) {
  std::function<size_t()> ready;
  if (progress_ != nullptr) ready = [this, index] { return progress_->ready(index); };
  sends_.emplace_back(sender_, to, header, bytes, std::move(ready));
  mailbox_.set_sending(true);
}

void ExchangeMessages::receive(const Awaited& awaited, const Message& message) {
  if (mailbox_.deliver(awaited, message) && progress_ != nullptr)
    progress_->received(awaited.index, awaited.into.size());
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
  const auto take = [&](int& from, const transport::Header& wanted) {
    return dispatcher_.take_message(from, wanted);
  };
  const auto received = [&](const Awaited& one, const Message& message) { receive(one, message); };
  const bool delivered = mailbox_.deliver_awaited(take, received);
  if (progress_ != nullptr)
    mailbox_.report_arriving(
        [&](const Awaited& one, size_t bytes) { progress_->received(one.index, bytes); });
  return delivered || moved;
}

int ExchangeMessages::sending_to() const {
  for (const SendMessage& one : sends_)
    if (!one.done()) return one.sending_to();
  return collectives::kNoRank;
}

// A receive is agreed when its answer is about to be sent: the peer cannot refuse it any more.
void AgreeOnMessages::receive(const Awaited& awaited, const Message& message) {
  const bool sends = is_answer(awaited.signature);
  const bool agreed = same_call(message.header, awaited.signature);
  if (!sends && is_agreement(message.header)) {
    transport::Header answer = answer_of(awaited.signature);
    answer.epoch = message.header.epoch;
    send(awaited.from, answer, {});
  }
  if (!agreed)
    refused_.emplace_back(awaited.index, message.header);
  else if (sends)
    sent_.emplace_back(message.arrival, awaited.index);
  else
    received_.push_back(awaited.index);
}

std::vector<size_t> AgreeOnMessages::agreed() const {
  std::vector<size_t> all = received_;
  auto sent = sent_;
  std::ranges::sort(sent);
  for (const auto& [arrival, index] : sent) all.push_back(index);
  return all;
}

}  // namespace pycomm::engine
