#include "load.hpp"

#include <algorithm>
#include <cstring>

#include "crc32c.hpp"
#include "error.hpp"
#include "failpoint.hpp"

namespace zs {
namespace {

uint64_t page_up(uint64_t offset) {
  return (offset + File::kAlign - 1) / File::kAlign * File::kAlign;
}

std::string obstacle(const Plan& plan) {
  if (plan.chunk_bytes() % File::kAlign != 0) return "chunks are no multiple of a page";
  return "";
}

}  // namespace

void Load::check(const Pool& pool, const Order& order) {
  const auto usage = [](const std::string& why) { throw Error(Kind::usage, why); };
  if (order.staging->nbytes() < pool.threads() * Checks::kBlock)
    usage("staging memory has no block for each thread");
  if (order.targets.data.size() != order.pieces.size())
    usage(std::to_string(order.targets.data.size()) + " targets for " + std::to_string(order.pieces.size()) +
          " pieces");
  for (size_t k = 0; k < order.pieces.size(); ++k) {
    const uint32_t piece = order.pieces[k];
    const Geometry& geometry = (*order.targets.geometries)[k];
    if (piece >= order.plan->pieces() || (k > 0 && piece <= order.pieces[k - 1]))
      usage("pieces must rise and be in the plan, unlike piece " + std::to_string(piece));
    if (geometry.nbytes != order.plan->size(piece))
      usage("target " + std::to_string(k) + " has " + std::to_string(geometry.nbytes) + " bytes, piece " +
            std::to_string(piece) + " has " + std::to_string(order.plan->size(piece)));
    const int16_t place = order.targets.place(k);
    if (place == Arrays::kHost) {
      if (order.straight) usage("cuFile does not read into the host's memory");
    } else if (!order.device || place != order.device->ordinal()) {
      usage("target " + std::to_string(k) + " is on another device");
    } else if (!geometry.contiguous()) {
      throw Error(Kind::capability, "target " + std::to_string(k) + " is strided and on a device");
    }
  }
  if (!order.only) return;
  const std::vector<uint64_t>& only = *order.only;
  for (size_t k = 0; k < only.size(); ++k)
    if (only[k] >= order.plan->chunks() || (k > 0 && only[k] <= only[k - 1]))
      usage("chunks must rise and be in the plan, unlike chunk " + std::to_string(only[k]));
}

std::vector<Load::Stretch> Load::cut(const Order& order, const Checks& checks) {
  std::vector<Stretch> stretches;
  const Plan& plan = *order.plan;
  const auto blocks_in_chunk = (plan.chunk_bytes() + Checks::kBlock - 1) / Checks::kBlock;
  const auto wanted = [&](uint64_t chunk) {
    return !order.only || std::binary_search(order.only->begin(), order.only->end(), chunk);
  };
  size_t first = 0;
  for (uint64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    const auto reaches = [&](size_t k, uint64_t offset) {
      return plan.offset(order.pieces[k]) + plan.size(order.pieces[k]) > offset;
    };
    while (first < order.pieces.size() && !reaches(first, plan.chunk_begin(chunk))) ++first;
    if (first == order.pieces.size()) break;
    if (!wanted(chunk) || plan.offset(order.pieces[first]) >= plan.chunk_end(chunk)) continue;
    size_t from = first;
    for (uint64_t index = chunk * blocks_in_chunk;
         index < std::min<uint64_t>((chunk + 1) * blocks_in_chunk, checks.blocks()); ++index) {
      const Checks::Block block = checks.block(index);
      const uint64_t end = block.offset + block.nbytes;
      while (from < order.pieces.size() && !reaches(from, block.offset)) ++from;
      size_t last = from;
      while (last < order.pieces.size() && plan.offset(order.pieces[last]) < end) ++last;
      Stretch stretch{index, block.offset, end, from, last};
      if (!checks.checking()) {  // no more than what is wanted, by whole pages
        if (from == last) continue;
        const uint64_t begin = plan.offset(order.pieces[from]);
        const uint64_t stop = plan.offset(order.pieces[last - 1]) + plan.size(order.pieces[last - 1]);
        stretch.begin = std::max(stretch.begin, begin / File::kAlign * File::kAlign);
        stretch.end = std::min(stretch.end, page_up(stop));
      }
      stretches.push_back(stretch);
    }
  }
  return stretches;
}

std::shared_ptr<Load> Load::begin(const Pool& pool, Order order) {
  check(pool, order);
  auto checks = std::make_unique<Checks>(order.plan->nbytes(), order.plan->chunk_bytes(), order.checksums);
  std::vector<Stretch> stretches = cut(order, *checks);
  std::shared_ptr<Load> job(new Load(pool, std::move(order), std::move(checks), std::move(stretches)));
  try {
    job->open(pool.threads());
  } catch (...) {
    job->cancel();
    throw;
  }
  job->start();
  return job;
}

Load::Load(const Pool& pool, Order order, std::unique_ptr<Checks> checks, std::vector<Stretch> stretches)
    : Job(pool.workers(), stretches.size()),
      order_(std::move(order)),
      checks_(std::move(checks)),
      stretches_(std::move(stretches)),
      file_(order_.fd, order_.direct && !order_.straight, obstacle(*order_.plan)) {}

void Load::open(unsigned threads) {
  for (unsigned k = 0; k < threads; ++k)
    slots_.all().push_back({order_.staging->data() + k * Checks::kBlock, 0, nullptr});
  if (!order_.device) return;
  const cuda::Context::Current current(*order_.device->context());
  int least = 0, greatest = 0;
  ZS_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
  for (Slot& slot : slots_.all())
    ZS_CUDA(cuStreamCreateWithPriority, &slot.stream, CU_STREAM_NON_BLOCKING, least);
  if (!order_.straight) return;
  straight_memory_ = order_.device->vram()->lend(threads * Checks::kBlock);
  if (!straight_memory_) throw Error(Kind::capacity, "the device has no memory for cuFile to read into");
  registration_.emplace(order_.device->context(), straight_memory_.at(), threads * Checks::kBlock);
  bounced_ = registration_->problem();
  for (unsigned k = 0; k < threads; ++k) slots_.all()[k].device = straight_memory_.at() + k * Checks::kBlock;
}

Load::~Load() {
  let_go();
}

void Load::let_go() noexcept {
  if (order_.device) {
    try {
      const cuda::Context::Current current(*order_.device->context());
      for (Slot& slot : slots_.all())
        if (slot.stream != nullptr) cuda::driver().cuStreamDestroy(slot.stream);
    } catch (const Error&) {
      // The process ends and the driver has gone before us.
    }
  }
  slots_.all().clear();
  registration_.reset();
  straight_memory_ = {};
}

void Load::work(uint64_t unit) {
  const Stretch& stretch = stretches_[unit];
  failpoint("load", stretch.block);
  const Idle<Slot>::Lease lease(slots_);
  const Slot& slot = lease.held;
  std::optional<cuda::Context::Current> current;
  if (order_.device) current.emplace(*order_.device->context());
  const uint64_t nbytes = stretch.end - stretch.begin;
  if (order_.held != nullptr) {
    take_held(stretch, slot);
    add_progress(nbytes);
    return;
  }
  std::byte* const place = within_target(stretch);
  if (place != nullptr && in_place(place, nbytes)) {
    read(place, stretch);
    if (checks_->checking()) judge(stretch, crc32c(place, nbytes));
  } else if (order_.device) {
    send(stretch, slot);
  } else {
    pass_on(stretch, slot, place);
  }
  add_progress(nbytes);
}

void Load::read(std::byte* to, const Stretch& stretch) {
  need(file_.read(to, stretch.end - stretch.begin, stretch.begin), stretch);
}

void Load::need(bool there, const Stretch& stretch) const {
  if (!there)
    throw Error(Kind::corrupt, "the file ends before byte " + std::to_string(stretch.end) + " of " +
                                   std::to_string(order_.plan->nbytes()));
}

void Load::pass_on(const Stretch& stretch, const Slot& slot, std::byte* place) {
  const bool checking = checks_->checking();
  uint32_t checksum = 0;
  Stretch part = stretch;
  for (; part.begin < stretch.end; part.begin = part.end) {
    part.end = std::min(stretch.end, part.begin + kWarm);
    const uint64_t nbytes = part.end - part.begin;
    read(slot.host, part);
    if (checking && place != nullptr) {
      checksum = crc32c_copy(place + (part.begin - stretch.begin), slot.host, nbytes, checksum);
    } else {
      if (checking) checksum = crc32c(slot.host, nbytes, checksum);
      deliver(part, slot);
    }
  }
  if (checking) judge(stretch, checksum);
}

void Load::send(const Stretch& stretch, const Slot& slot) {
  const uint64_t nbytes = stretch.end - stretch.begin;
  if (!order_.straight) {
    read(slot.host, stretch);
  } else {
    need(order_.straight->read(slot.device, nbytes, stretch.begin), stretch);
    if (checks_->checking()) {  // a copy for the processor to look at; the bus's other way has nothing to do
      ZS_CUDA(cuMemcpyDtoHAsync, slot.host, slot.device, nbytes, slot.stream);
      ZS_CUDA(cuStreamSynchronize, slot.stream);
    }
  }
  if (checks_->checking()) judge(stretch, crc32c(slot.host, nbytes));
  deliver(stretch, slot);
}

bool Load::in_place(const std::byte* place, uint64_t nbytes) const {
  if (!file_.direct()) return true;
  const auto at = reinterpret_cast<uintptr_t>(place);
  if (at % file_.memory_align() != 0) return false;
  // Small pages are many requests to the disk, at a third of its speed. What nobody has touched yet is the
  // loader's own memory, which gets huge ones as it is read into.
  const PageTable::Kind kind = pages_.kind(place, nbytes);
  return kind == PageTable::Kind::huge || (kind != PageTable::Kind::small && at % File::kAlign == 0);
}

std::byte* Load::within_target(const Stretch& stretch) const {
  if (stretch.last - stretch.first != 1) return nullptr;
  const uint64_t offset = order_.plan->offset(order_.pieces[stretch.first]);
  const Geometry& geometry = (*order_.targets.geometries)[stretch.first];
  if (order_.targets.place(stretch.first) != Arrays::kHost || !geometry.contiguous() ||
      offset > stretch.begin || offset + geometry.nbytes < stretch.end)
    return nullptr;
  return order_.targets.data[stretch.first] + (stretch.begin - offset);
}

void Load::take_held(const Stretch& stretch, const Slot& slot) {
  const std::byte* const bytes = order_.held + stretch.begin;
  const uint64_t nbytes = stretch.end - stretch.begin;
  std::byte* const place = within_target(stretch);
  std::byte* const to = place != nullptr ? place : slot.host;
  if (checks_->checking())
    judge(stretch, crc32c_copy(to, bytes, nbytes));
  else
    std::memcpy(to, bytes, nbytes);
  if (place == nullptr) deliver(stretch, slot);
}

void Load::judge(const Stretch& stretch, uint32_t checksum) {
  if (checks_->record(stretch.block, checksum) == Checks::Verdict::bad)
    throw Error(Kind::corrupt, "chunk " + std::to_string(stretch.begin / order_.plan->chunk_bytes()) +
                                   " of " + std::to_string(order_.plan->chunks()) + " fails its checksum");
}

void Load::deliver(const Stretch& stretch, const Slot& slot) {
  bool copied = false;
  for (size_t k = stretch.first; k < stretch.last; ++k) {
    const uint64_t offset = order_.plan->offset(order_.pieces[k]);
    const uint64_t from = std::max(stretch.begin, offset);
    const uint64_t to = std::min(stretch.end, offset + order_.plan->size(order_.pieces[k]));
    if (from >= to) continue;
    std::byte* const target = order_.targets.data[k];
    const uint64_t at = from - stretch.begin;
    if (order_.targets.place(k) == Arrays::kHost) {
      scatter(target, slot.host + at, (*order_.targets.geometries)[k], from - offset, to - offset);
      continue;
    }
    const auto goal = reinterpret_cast<CUdeviceptr>(target) + (from - offset);
    if (order_.straight && order_.held == nullptr)
      ZS_CUDA(cuMemcpyDtoDAsync, goal, slot.device + at, to - from, slot.stream);
    else
      ZS_CUDA(cuMemcpyHtoDAsync, goal, slot.host + at, to - from, slot.stream);
    copied = true;
  }
  if (copied) ZS_CUDA(cuStreamSynchronize, slot.stream);
}

void Load::close(bool) {
  file_.restore();
  let_go();  // a thread of the pool may hold the job a while longer
}

}  // namespace zs
