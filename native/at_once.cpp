#include "at_once.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "error.hpp"
#include "job.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "prefetch.hpp"

namespace zs {
namespace {

constexpr uint64_t kTiny = 512;
constexpr uint64_t kAllTiny = 256 << 10;  // more than this would not stay in the caches
constexpr uint64_t kTask = 1 << 20;       // copies are cut into tasks of about this much
constexpr size_t kAhead = 32;  // sources lie anywhere: asked for ahead, their bytes are there in time

void copy_task(const AtOnce& what, const Plan& plan, const Arrays& arrays, std::byte* image,
               const Task& task) {
  for (size_t k = task.first; k < task.last; ++k) {
    const uint32_t piece = what.others[k];
    if (k + kAhead < task.last) prefetch(arrays.data[what.others[k + kAhead]]);
    gather(image + plan.offset(piece) + task.begin, arrays.data[piece], (*arrays.geometries)[piece],
           task.begin, std::min(task.end, plan.size(piece)));
  }
}

class Placing final : public Job {
 public:
  Placing(std::shared_ptr<Workers> workers, const AtOnce& what, const Plan& plan, const Arrays& arrays,
          std::byte* image)
      : Job(std::move(workers), what.tasks.size()),
        what_(what),
        plan_(plan),
        arrays_(arrays),
        image_(image) {}

  void run_here() {
    workers_->add_first(shared_from_this());
    while (run_one()) {
    }
    wait_for(std::nullopt);
    rethrow();
  }

 protected:
  void work(uint64_t unit) override { copy_task(what_, plan_, arrays_, image_, what_.tasks[unit]); }

 private:
  const AtOnce& what_;
  const Plan& plan_;
  const Arrays& arrays_;
  std::byte* const image_;
};

}  // namespace

std::shared_ptr<const AtOnce> AtOnce::make(const Plan& plan, const Arrays& arrays, const Pieces& pieces) {
  auto made = std::make_shared<AtOnce>();
  made->pieces = pieces;
  made->geometries = arrays.geometries;
  made->places = arrays.places;
  made->marks.resize(plan.pieces());
  if (pieces)
    for (const uint32_t piece : *pieces) {
      if (piece >= plan.pieces())
        throw Error(Kind::usage, "there is no piece " + std::to_string(piece) + " to copy at once");
      const uint64_t nbytes = plan.size(piece);
      uint8_t& mark = made->marks[piece];
      if (mark != kNot) continue;
      mark = kPlaced;
      if (nbytes == 0 || arrays.place(piece) != Arrays::kHost) continue;
      if (nbytes <= kTiny && made->tiny_bytes + nbytes <= kAllTiny &&
          (*arrays.geometries)[piece].contiguous()) {
        mark = kBeside;
        made->tiny.push_back({piece, static_cast<uint32_t>(nbytes), made->tiny_bytes});
        made->tiny_bytes += nbytes;
      } else {
        made->others.push_back(piece);
      }
    }
  made->tasks = cut_tasks(plan, made->others, kTask);
  return made;
}

void AtOnce::gather_tiny(Arrays& arrays, std::byte* beside) const {
  for (size_t k = 0; k < tiny.size(); ++k) {
    if (k + kAhead < tiny.size()) prefetch(arrays.data[tiny[k + kAhead].piece]);
    const auto& [piece, nbytes, at] = tiny[k];
    if (nbytes == 4)  // a count of steps
      std::memcpy(beside + at, arrays.data[piece], 4);
    else
      std::memcpy(beside + at, arrays.data[piece], nbytes);
    arrays.data[piece] = beside + at;
  }
}

void AtOnce::place_others(const Plan& plan, const Arrays& arrays, std::byte* image,
                          const std::shared_ptr<Workers>& workers) const {
  if (tasks.size() > 2) return std::make_shared<Placing>(workers, *this, plan, arrays, image)->run_here();
  for (const Task& task : tasks) copy_task(*this, plan, arrays, image, task);  // waking a worker takes longer
}

}  // namespace zs
