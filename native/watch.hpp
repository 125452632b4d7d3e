// Do containers of Python still hold the very objects they held? Asked before every capture.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

struct _object;  // PyObject

namespace zs {

// Everything here needs the GIL, the destructor too. Keeps a reference to each container and each item, so
// that no address can come back as another object.
class Watch {
 public:
  // Of dicts, lists, sets, and attributes as tuples (owner, name). Throws Kind::usage for anything else.
  explicit Watch(const std::vector<_object*>& containers);
  // `behind`: further ones that change only where one of the `doors`, which are dicts, was written to. As
  // long as none was they are not looked at; where that cannot be told, or there are no doors, they always
  // are.
  Watch(const std::vector<_object*>& containers, const std::vector<_object*>& behind,
        const std::vector<_object*>& doors);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();

  bool same();
  // Whether no container was written to since renew(), or since the beginning: what it holds is the very
  // same, plain values too. Also false where that cannot be told.
  bool untouched() const;
  void renew();

  // Where a dict's tag is, and what it was.
  struct Tag {
    const uint64_t* at;
    uint64_t then;
  };
  // Adds the tags that, while all of them stay, tell what same() tells of dicts (`renewed`: what untouched()
  // does), as these saw them last. False where it is not told by tags.
  bool add_tags(std::vector<Tag>& tags, bool renewed) const;
  // What same() tells, where no tag has changed.
  bool others_same() const;
  bool dropped() const { return dropped_; }

  // For Python's collector of cycles: every object held, until `visit` returns other than 0; and letting go
  // of all, after which nothing is the same any more.
  int traverse(int (*visit)(_object*, void*), void* argument) const;
  void drop() noexcept;

 private:
  enum class Shape : uint8_t { dict, list, set, attribute };

  struct Container {
    _object* object;
    Shape shape;
    bool tagged;           // a dict, of which the tag tells each change
    size_t end;            // of its items in items_
    uint64_t tag = 0;      // as same() saw it, all items being the same
    uint64_t renewed = 0;  // as renew() saw it
  };

  void hold(_object* item);
  bool same_items(const Container& container, size_t first) const;
  static Shape shape_of(_object* container);
  bool same_elements(const Container& container, size_t first) const;
  bool same_members(const Container& container, size_t first) const;
  bool same_attribute(const Container& container, size_t first) const;
  bool same_now(const Container& container, size_t first) const;
  [[gnu::always_inline]] static inline void fetch_ahead(const Container& container) noexcept;

  bool dropped_ = false;
  std::vector<Container> containers_;
  std::vector<std::pair<size_t, size_t>>
      others_;                   // containers without a tag that tells, and their first items
  std::vector<_object*> items_;  // of a dict: key, value, key, value
  std::unique_ptr<Watch> behind_, doors_;
};

}  // namespace zs
