/* Reads a KDTR v1 file by the page that defines the format and nothing else:
 *     kdtr_reader FILE
 * One line a tensor: name, dtype, dims, crc32 (verified), separated by tabs.
 * A malformed file: exit status 1 and one line on stderr, "tensor 2: misaligned" (tensors
 * count from 1; 0 is the file as a whole). C99, any byte order. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct { const char *name; unsigned size; } dtypes[] = {
    {"", 0},    {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"f64", 8}, {"i8", 1},  {"u8", 1},
    {"i16", 2}, {"u16", 2}, {"i32", 4}, {"u32", 4},  {"i64", 8}, {"u64", 8}, {"bool", 1},
};
static const unsigned char *data;
static uint64_t size, position, limit = 16; /* limit: where header or table ends */
static uint32_t tensor;

static void check(int good, const char *fault) {
    if (good) return;
    fprintf(stderr, "tensor %" PRIu32 ": %s\n", tensor, fault);
    exit(1);
}

static const unsigned char *take(uint64_t bytes) {
    check(bytes <= limit - position, "runs past table_bytes");
    position += bytes;
    return data + position - bytes;
}

static uint64_t number(int bytes) {
    const unsigned char *at = take(bytes);
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

static int is_utf8(const unsigned char *s, uint64_t n) {
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    for (const unsigned char *end = s + n; s < end;) {
        uint32_t c = *s++;
        int more = c < 0x80 ? 0 : c >> 5 == 6 ? 1 : c >> 4 == 14 ? 2 : c >> 3 == 30 ? 3 : -1;
        if (more < 0 || end - s < more) return 0;
        if (more) c &= 0x3Fu >> more;
        for (int i = 0; i < more; i++, s++) {
            if (*s >> 6 != 2) return 0;
            c = c << 6 | (*s & 0x3F);
        }
        if (c < least[more] || c > 0x10FFFF || c >> 11 == 27) return 0; /* 27: surrogate */
    }
    return 1;
}

static uint32_t crc32(const unsigned char *s, uint64_t n) {
    uint32_t crc = 0xFFFFFFFF;
    while (n--) {
        crc ^= *s++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

static void read_file(const char *path) {
    FILE *file = path ? fopen(path, "rb") : NULL;
    check(file && !fseek(file, 0, SEEK_END), "cannot be read");
    size = ftell(file);
    rewind(file);
    unsigned char *bytes = malloc(size + 1);
    check(bytes && fread(bytes, 1, size, file) == size, "cannot be read");
    fclose(file);
    data = bytes;
}

int main(int argc, char **argv) {
    read_file(argc == 2 ? argv[1] : NULL);
    check(size >= 16, "truncated");
    check(!memcmp(take(4), "KDTR", 4), "magic");
    check(number(4) == 1, "version");
    uint64_t n_tensors = number(4), table_bytes = number(4);
    limit += table_bytes;
    check(limit <= size, "truncated");
    check(n_tensors <= table_bytes / 25, "n_tensors");
    struct entry {
        const unsigned char *name; /* its length and text: compared together */
        uint64_t dtype, offset, nbytes, crc;
    } *entries = calloc(n_tensors + 1, sizeof *entries), *e = entries;
    check(entries != NULL, "cannot be read");

    uint64_t end = limit;
    for (tensor = 1; tensor <= n_tensors; tensor++, e++) {
        e->name = data + position;
        uint64_t name_bytes = number(2);
        check(name_bytes >= 1 && name_bytes <= 255, "name_bytes");
        check(is_utf8(take(name_bytes), name_bytes), "not UTF-8");
        for (struct entry *other = entries; other < e; other++)
            check(memcmp(other->name, e->name, 2 + name_bytes), "duplicate name");
        e->dtype = number(1);
        uint64_t ndim = number(1), product, empty = 0;
        check(e->dtype >= 1 && e->dtype <= 13, "unknown dtype code");
        product = dtypes[e->dtype].size;
        printf("%.*s\t%s\t", (int)name_bytes, e->name + 2, dtypes[e->dtype].name);
        for (uint64_t i = 0; i < ndim; i++) {
            uint64_t dim = number(8);
            check(!dim || product <= INT64_MAX / dim, "overflow");
            if (dim) product *= dim; else empty = 1;
            printf(i ? ",%" PRIu64 : "%" PRIu64, dim);
        }
        e->offset = number(8);
        e->nbytes = number(8);
        e->crc = number(4);
        check(e->nbytes == (empty ? 0 : product), "nbytes");
        check(e->offset % 64 == 0, "misaligned");
        check(e->offset >= end, "overlaps");
        check(e->offset <= size && e->nbytes <= size - e->offset, "truncated");
        end = e->offset + e->nbytes;
        printf("\t%08" PRIx64 "\n", e->crc);
    }
    tensor = 0;
    check(position == limit, "table_bytes");
    check(end == size, "follow the last tensor");

    end = limit;
    for (tensor = 1, e = entries; tensor <= n_tensors; tensor++, e++) {
        for (; end < e->offset; end++) check(data[end] == 0, "padding");
        check(crc32(data + e->offset, e->nbytes) == e->crc, "CRC-32");
        for (; end < e->offset + e->nbytes; end++)
            check(e->dtype != 13 || data[end] <= 1, "neither 0 nor 1");
    }
    return 0;
}
